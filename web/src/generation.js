// The models write on, a token at a time and in step.
import { html } from "htm/preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useIds } from "./ids.js";
import { NOTHING_ADDED, changed } from "./view_state.js";
import { visible } from "./words.js";

const PAUSE = 450; // milliseconds between tokens while it plays

export function Generation({ models, runs, view, wanted, source, question, onChange, onRefusal }) {
  const id = useIds();
  const [isPlaying, setPlaying] = useState(false);
  const [temperature, setTemperature] = useState(0);
  const isBusy = useRef(false);
  const sides = Object.keys(models);
  const isReady =
    (source.live || !changed(view.lambdas)) &&
    sides.every((side) => runs[side] && runs[side].tokens.length < models[side].most_tokens);

  const step = async () => {
    if (isBusy.current) return;
    isBusy.current = true;
    const { text, added: before } = wanted;
    try {
      const written = await Promise.all(
        sides.map((side) => source.next({ ...question(side), temperature, seed: 0 })),
      );
      onChange((now) => {
        if (now.text !== text || now.added !== before) return {}; // the tokens are of a text that is gone
        const added = { ...now.added };
        sides.forEach((side, i) => (added[side] = [...added[side], written[i].token]));
        return { added, row: null };
      });
    } catch (error) {
      setPlaying(false);
      onRefusal({ side: "left", message: error.message });
    } finally {
      isBusy.current = false;
    }
  };

  useEffect(() => {
    if (!isPlaying) return undefined;
    if (!isReady) {
      if (sides.every((side) => runs[side])) setPlaying(false);
      return undefined;
    }
    const timer = setTimeout(step, PAUSE);
    return () => clearTimeout(timer);
  });

  const restart = () => {
    setPlaying(false);
    const { tokens = [], asked } = runs.left ?? {};
    const length = tokens.length - (asked?.append?.length ?? 0); // of the text
    onChange(({ answer }) => ({ added: NOTHING_ADDED, row: null, answer: answer?.query < length ? answer : null }));
  };
  // Of the run that is shown: the model on the right answers later, and until then has written nothing new.
  const written = (side) => {
    const { pieces = [], asked } = runs[side] ?? {};
    return pieces.slice(pieces.length - (asked?.append?.length ?? 0));
  };

  return html`
    <section class="card generation" aria-labelledby=${id("generation-title")}>
      <h2 id=${id("generation-title")}>Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!isReady} onClick=${step}>Step</button>
        <button type="button" disabled=${!isReady && !isPlaying} aria-pressed=${isPlaying}
          onClick=${() => setPlaying(!isPlaying)}>${isPlaying ? "Pause" : "Play"}</button>
        <button type="button" disabled=${!view.added.left.length} onClick=${restart}>Begin again</button>
        ${source.live && html`<label class="temperature">Temperature
          <select value=${temperature} onChange=${(event) => setTemperature(Number(event.target.value))}>
            ${[0, 0.5, 0.8, 1, 1.5].map((value) => html`<option key=${value} value=${value}>${value || "0, most likely"}</option>`)}
          </select>
        </label>`}
      </div>
      ${sides.map((side) => view.added[side].length > 0 && html`
        <p class="written" key=${side}><span class="quiet">${models[side].label} </span>
          ${written(side).map((piece, i, all) => html`<span class=${i === all.length - 1 ? "last" : ""}>${visible(piece)}</span>${models[side].between}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom${sides.length > 1 ? "; both models write one at a time" : ""}.
        ${!source.live && ` This saved page holds what the ${sides.length > 1 ? "models write" : "model writes"} with the learned λ.`}</p>
    </section>`;
}
