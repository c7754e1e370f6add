// The text to look at, and examples.
import { html } from "htm/preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useIds } from "./ids.js";
import { NOTHING_ADDED } from "./view_state.js";

export function TextPanel({ data, source, view, refusal, onChange, onRefusal }) {
  const id = useIds();
  const [draft, setDraft] = useState(view.text);
  const seed = useRef(0);
  const waiting = useRef(null);
  const sent = useRef(view.text);
  // Not what was typed here, as more may have been typed since.
  useEffect(() => {
    if (view.text !== sent.current) setDraft(view.text);
    sent.current = view.text;
  }, [view.text]);

  const show = (text, answer = null) => {
    clearTimeout(waiting.current);
    sent.current = text;
    setDraft(text);
    onChange({ text, answer, added: NOTHING_ADDED, row: null });
  };
  const type = (text) => {
    setDraft(text);
    clearTimeout(waiting.current);
    waiting.current = setTimeout(() => show(text), 350);
  };
  const draw = async () => {
    try {
      seed.current += 1;
      const example = await source.example({ seed: seed.current });
      show(example.text, example.answer);
    } catch (error) {
      onRefusal({ side: "left", message: error.message });
    }
  };

  return html`
    <section class="card text" aria-labelledby=${id("text-title")}>
      <div class="card-head">
        <h2 id=${id("text-title")}><label for=${id("text")}>Text</label></h2>
        ${source.live && data.draws_examples && html`<button type="button" class="link" onClick=${draw}>Another question</button>`}
      </div>
      <textarea id=${id("text")} rows="4" spellcheck="false" readonly=${!source.live} value=${draft}
        aria-describedby=${id("refused")} onInput=${(event) => type(event.target.value)}></textarea>
      ${refusal && html`<p id=${id("refused")} class="refused">${refusal.message}</p>`}
      ${source.live && data.examples.length > 0 && html`<p class="examples">
        ${data.examples.map((example) => html`<button type="button" class="chip" key=${example.title}
            onClick=${() => show(example.text, example.answer)}>${example.title}</button>`)}
      </p>`}
      ${!source.live && html`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`;
}
