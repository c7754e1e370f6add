// What the model would write next, before and after λ was moved, and what that does to the loss.
import { html } from "htm/preact";
import { useIds } from "./ids.js";
import { saveNext } from "./save.js";
import { SaveButtons } from "./save_buttons.js";
import { label, number, percent, titleOf } from "./words.js";

function Measure({ name, value, before, title }) {
  return html`
    <tr title=${title}>
      <th scope="row">${name}</th>
      <td><b>${value}</b></td>
      <td class="before">${before ?? ""}</td>
    </tr>`;
}

export function Predictions({ run, right, models, theme }) {
  const id = useIds();
  const { grid } = models.left;
  const title = titleOf(models.left);
  if (!run) return html`<section class="card predictions" aria-busy="true"><h2>${title}</h2></section>`;
  if (run.is_recorded === false) {
    return html`<section class="card predictions">
      <h2>${title}</h2>
      <p class="quiet">What the model predicts with these λ was not recorded in this saved page; <code>${grid ? "explore_images" : "diff-transformer explore"}</code> computes it.</p>
    </section>`;
  }
  const entries = run.next.slice(0, 10);
  const most = Math.max(...run.next.flatMap((entry) => [entry.probability, entry.learned_probability]), 1e-9);
  const width = (share) => ({ width: `${(100 * share) / most}%` });
  const isMoved = run.divergence > 0;
  return html`
    <section class="card predictions" aria-labelledby=${id("next-title")}>
      <div class="card-head">
        <h2 id=${id("next-title")}>${title}</h2>
        <span class="buttons"><${SaveButtons} onSave=${(kind) => saveNext(models.left, run, theme, kind)} /></span>
      </div>
      <table class="bars">
        <caption class="hidden">The most likely, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>name</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${entries.map((entry) => html`
            <tr key=${entry.token}>
              <th scope="row">${label(entry.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${width(entry.probability)}></span>
                <span class="was" style=${{ left: `${(100 * entry.learned_probability) / most}%` }}></span>
              </td>
              <td class="value">${percent(entry.probability, 1)}</td>
              <td class="value was-value">${isMoved ? percent(entry.learned_probability, 1) : ""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${isMoved && html`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${Measure} name="KL to the learned λ" value=${`${number(run.divergence)} nats`}
            title="KL(learned ‖ now) of what is predicted" />
          ${!grid && html`<${Measure} name="Loss on the text" value=${number(run.loss)} before=${number(run.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />`}
          ${run.answer_probability !== undefined && html`<${Measure} name="Probability of the answer"
            value=${percent(run.answer_probability, 1)} before=${percent(run.learned_answer_probability, 1)} />`}
          ${run.answer_share !== undefined && html`<${Measure} name="Attention on the answer" value=${percent(run.answer_share, 1)}
            before=${percent(run.learned_answer_share, 1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${right && html`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${models.right.label}</th></tr>
          ${!grid && html`<${Measure} name="Loss on the text" value=${number(right.loss)} />`}
          ${right.answer_probability !== undefined && html`<${Measure} name="Probability of the answer" value=${percent(right.answer_probability, 1)} />`}
          ${right.answer_share !== undefined && html`<${Measure} name="Attention on the answer" value=${percent(right.answer_share, 1)} />`}
          <tr><th scope="row">${title}</th><td colspan="2">${right.next.slice(0, 2)
            .map((entry) => `“${label(entry.piece)}” ${percent(entry.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`;
}
