// All heads of a model, layer below layer, each with the picture of its map and its numbers.
import { html } from "htm/preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { fromBase64 } from "./decode.js";
import { paintPictures } from "./draw.js";
import { useIds } from "./ids.js";
import { saveGrid } from "./save.js";
import { SaveButtons } from "./save_buttons.js";
import { useWidth } from "./use_width.js";
import { nameInGroup, percent, place } from "./words.js";

const KEYS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export function HeadGrid({ side, model, heads, isBusy, chosen, theme, onChoose }) {
  const id = useIds();
  const grid = useRef(null);
  const canvas = useRef(null);
  const [frame, width] = useWidth();
  const pictures = useMemo(() => {
    if (!heads) return null;
    const all = typeof heads.pictures === "string" ? new Int8Array(fromBase64(heads.pictures)) : heads.pictures;
    const size = heads.picture_size ** 2;
    return (index) => all.subarray(index * size, (index + 1) * size);
  }, [heads?.pictures]);
  // Anew with other numbers, too: a line of them moves the rows below.
  useEffect(() => {
    if (!pictures) return;
    paintPictures(canvas.current, frame.current.querySelectorAll(".picture"), pictures, heads.picture_size, theme);
  }, [heads, theme, width]);

  // The grid alone moves, and to the side: the page stays where the reader is.
  useEffect(() => {
    const scroll = frame.current.parentElement;
    const [outer, inner] = [scroll, grid.current.querySelector(".chosen")].map((one) => one.getBoundingClientRect());
    const [left, right] = [inner.left - inner.width, inner.right + inner.width]; // with a neighbour
    scroll.scrollLeft += Math.max(0, right - outer.right) + Math.min(0, left - outer.left);
  }, [chosen.layer, chosen.head]);

  const move = (event) => {
    const step = KEYS[event.key];
    if (!step) return;
    event.preventDefault();
    const layer = Math.min(model.layers, Math.max(1, chosen.layer + step[0]));
    const head = Math.min(model.heads, Math.max(1, chosen.head + step[1]));
    onChoose({ layer, head });
    grid.current.querySelector(`[data-head="${place(layer, head)}"]`)?.focus();
  };

  const range = (count) => Array.from({ length: count }, (_, i) => i + 1);
  const removed = (layer, head) => heads?.removed?.[layer - 1][head - 1];
  const onAnswer = (layer, head) => heads?.on_answer?.[layer - 1][head - 1];
  const describe = (layer, head) =>
    [
      `Head ${place(layer, head)}`,
      nameInGroup(model, head),
      removed(layer, head) !== undefined && `the subtraction removes ${percent(removed(layer, head))} of A1`,
      onAnswer(layer, head) !== undefined && `${percent(onAnswer(layer, head))} on the answer`,
    ]
      .filter(Boolean)
      .join(", ");
  const dense = model.heads > 8;

  return html`
    <section class=${`card grid-card ${dense ? "dense" : ""}`} aria-labelledby=${id(`grid-${side}`)}>
      <div class="card-head">
        <h2 id=${id(`grid-${side}`)}>${model.label}, all heads</h2>
        <span class="buttons">
          <${SaveButtons} disabled=${!heads} onSave=${(kind) => saveGrid(model, heads, pictures, theme, kind)} />
        </span>
      </div>
      <div class="scroll"><div class="sheet" ref=${frame}>
        <canvas ref=${canvas} width="8" height="8" aria-hidden="true"></canvas>
        <div class="grid" role="grid" aria-label=${`Heads of ${model.name}`} aria-busy=${isBusy} ref=${grid} onKeyDown=${move}
          style=${`--heads:${model.heads};--thumb:${dense ? 44 : model.heads > 4 ? 92 : 124}px`}>
          ${range(model.layers).map((layer) => html`
            <div class="grid-row" role="row" key=${layer}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${layer}</span>
              ${range(model.heads).map((head) => {
                const isChosen = chosen.layer === layer && chosen.head === head;
                return html`
                  <button type="button" role="gridcell" key=${head} class=${`head ${isChosen ? "chosen" : ""}`}
                    aria-selected=${isChosen} tabindex=${isChosen ? 0 : -1} data-head=${place(layer, head)}
                    aria-label=${describe(layer, head)} title=${describe(layer, head)} onClick=${() => onChoose({ layer, head })}>
                    <span class="picture"></span>
                    ${!dense && html`<span class="numbers" aria-hidden="true">
                      ${removed(layer, head) !== undefined && html`<span>${removed(layer, head) > 0.005 ? "−" : ""}${percent(removed(layer, head))}</span>`}
                      ${onAnswer(layer, head) !== undefined && html`<span class="on-answer">◎ ${percent(onAnswer(layer, head))}</span>`}
                    </span>`}
                    ${dense && removed(layer, head) !== undefined &&
                    html`<span class="gauge" aria-hidden="true" style=${{ width: `${100 * removed(layer, head)}%` }}></span>`}
                  </button>`;
              })}
            </div>`)}
        </div>
      </div></div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${model.subtracts && (dense ? " The bar is the share of A₁ that the subtraction removes." : " −n %: the share of A₁ that the subtraction removes.")}
        ${heads?.on_answer && !dense ? " ◎: the share of the attention that is on the answer." : ""}
      </p>
    </section>`;
}
