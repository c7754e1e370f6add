// How well the model does with all λ times a factor, as a strip below the slider that moves the factor.
import { html } from "htm/preact";
import { useIds } from "./ids.js";
import { FACTORS } from "./lambda_panel.js";
import { useWidth } from "./use_width.js";
import { label, number, percent } from "./words.js";

const HEIGHT = 132;
const [TOP, BOTTOM] = [22, 20]; // pixels for the numbers above the points and for the factors below
const THUMB = 20; // of the slider, whose middle stands over the factor
const NEAR = 0.05; // an accuracy this close to the floor's is a guess

// On the line between two measured points; null beside them.
function between(factors, points, factor) {
  const next = factors.findIndex((each) => each >= factor);
  if (next < 0 || (next === 0 && factors[0] !== factor)) return null;
  const [high, low] = [next, Math.max(0, next - 1)].map((index) => points[factors[index]]?.value);
  if (high === undefined || low === undefined) return null;
  const part = next ? (factor - factors[next - 1]) / (factors[next] - factors[next - 1]) : 1;
  return low + part * (high - low);
}

function sentence(task, off, learned) {
  const share = (value, digits = 0) => percent(value, digits).replace(" ", "\u00a0");
  if (!task) return `the probability of “${label(off.piece)}” goes from ${share(learned.value, 1)} to ${share(off.value, 1)}.`;
  const isGuess = off.value <= task.floor + NEAR && learned.value > task.floor + NEAR;
  return `${isGuess ? `the model guesses: ${share(off.value)} of its` : `${share(off.value)} of the model’s`} answers are right, ${share(learned.value)} with the learned λ (${task.sequences} questions). A guess among the values in the text gives ${share(task.floor)}.`;
}

export function Strip({ factors, task, points, lambdas }) {
  const id = useIds();
  const [container, width] = useWidth();
  const measured = factors.filter((factor) => factor in points);
  const { 0: off, 1: learned } = points;
  const piece = points[measured[0]]?.piece;
  const highest = task ? 1 : Math.max(1e-9, ...measured.map((factor) => points[factor].value));
  const x = (factor) => THUMB / 2 + ((width - THUMB) * (factor - FACTORS[0])) / (FACTORS[1] - FACTORS[0]);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / highest);
  const { factor, layers, heads } = lambdas;
  // A layer or a head with a λ of its own is beside what was measured.
  const isOnStrip = Object.keys(layers).length + Object.keys(heads).length === 0;
  const now = between(factors, points, factor);
  return html`
    <section class=${`strip ${task ? "" : "of-text"}`} ref=${container} aria-labelledby=${id("strip-title")} hidden=${!measured.length}>
      <h2 id=${id("strip-title")}>${task ? "Right answers" : html`Probability of <b>${label(piece ?? "")}</b>`} by λ, in %</h2>
      ${measured.length > 0 && width > THUMB && html`
        <svg width=${width} height=${HEIGHT} role="img" aria-label=${measured
          .map((each) => `λ × ${each}: ${percent(points[each].value, task ? 0 : 1)}`).join(", ")}>
          ${task && html`
            <line class="floor" x1=${x(FACTORS[0])} x2=${x(FACTORS[1])} y1=${y(task.floor)} y2=${y(task.floor)} />
            <text x=${x(FACTORS[0])} y=${y(task.floor) - 5}>a guess</text>`}
          <text x=${x(FACTORS[0])} y=${HEIGHT - 5}>λ ×</text>
          <line class="axis" x1=${x(FACTORS[0])} x2=${x(FACTORS[1])} y1=${y(0)} y2=${y(0)} />
          ${isOnStrip && html`<line class="now" x1=${x(factor)} x2=${x(factor)} y1=${TOP - 6} y2=${y(0)} />`}
          <path d=${`M${measured.map((each) => `${x(each).toFixed(1)},${y(points[each].value).toFixed(1)}`).join("L")}`} />
          ${measured.map((each) => html`
            <circle key=${`c${each}`} cx=${x(each)} cy=${y(points[each].value)} r="2.5" />
            <text key=${`v${each}`} x=${x(each)} y=${y(points[each].value) - 8} text-anchor="middle">${
              percent(points[each].value, task ? 0 : 1).replace(" %", "")}</text>
            <text key=${`f${each}`} x=${x(each)} y=${HEIGHT - 5} text-anchor="middle">${number(each, 2).replace(/\.?0+$/, "") || "0"}</text>`)}
          ${isOnStrip && now !== null && html`<circle class="now" cx=${x(factor)} cy=${y(now)} r="5" />`}
        </svg>`}
      ${off && learned && html`<p>Switch the second map off (λ × 0) and ${sentence(task, off, learned)}</p>`}
      <p class="quiet">The learned λ of all heads are multiplied by the same factor.</p>
    </section>`;
}
