// An image under a grid of its patches, and the images to choose from.
import { html } from "htm/preact";
import { cssColour } from "./colour.js";
import { useIds } from "./ids.js";
import { number } from "./words.js";

// The image that a view shows, whose tokens begin at `first`; `others` of them, such as a class token, come before the
// patches. Null for a text.
export function imageOf({ examples, models }, { text }) {
  const { grid, most_tokens: length } = models.left;
  if (!grid) return null;
  const [rows, columns] = grid;
  const index = examples.findIndex(({ title }) => title === text);
  return { picture: examples[index]?.picture, first: index * length, rows, columns, others: length - rows * columns };
}

export const Patches = ({ image: { picture, rows, columns }, children }) => html`
  <div class="patches" style=${{ backgroundImage: picture ? `url(${picture})` : "none", gridTemplateColumns: `repeat(${columns}, 1fr)`, aspectRatio: `${columns} / ${rows}` }}>
    ${children}
  </div>`;

// How much of each patch reaches the chosen token through all layers.
export function Rollouts({ models, runs, image, row, theme }) {
  // A run of the image before may end after another was chosen. Its rollout keeps its place, unseen: a page that grows
  // shorter for a moment would scroll, and the pointer be on another patch.
  const isShown = (run) => !run.waitsForHeads && run.tokens[0] === image.first;
  const sides = Object.keys(models).filter((side) => runs[side]?.heads?.rollout);
  return html`
    <div class="rollouts">
      ${sides.map((side) => {
        const { rollout } = runs[side].heads;
        const reached = rollout[Math.min(row, rollout.length - 1)].slice(-image.rows * image.columns);
        const most = Math.max(...reached, 1e-9);
        return html`
          <figure key=${side} data-rollout=${side} style=${{ visibility: isShown(runs[side]) ? "visible" : "hidden" }}>
            <figcaption>${models[side].label}: what reaches token <b>${row + 1}</b> through all layers (attention rollout)</figcaption>
            <${Patches} image=${image}>
              ${reached.map((share, patch) => html`<span key=${patch} class="token" style=${{ background: cssColour(share, most, theme) }} title=${number(share)}></span>`)}
            <//>
          </figure>`;
      })}
    </div>`;
}

export function ImagePanel({ data, view, onChange }) {
  const id = useIds();
  return html`
    <section class="card images" aria-labelledby=${id("images-title")}>
      <h2 id=${id("images-title")}>Image</h2>
      <p class="examples">
        ${data.examples.map(({ title, picture }) => html`<button type="button" class="thumb" key=${title} aria-pressed=${title === view.text}
            onClick=${() => onChange({ text: title, row: null })}><img src=${picture} alt=${title} /></button>`)}
      </p>
    </section>`;
}
