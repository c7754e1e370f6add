// The row of one token as a curve: A1, λA2, and what is left.
import { html } from "htm/preact";
import { rowOf } from "./decode.js";
import { useWidth } from "./use_width.js";
import { label, number } from "./words.js";

const HEIGHT = 168;
const MARGIN = { left: 44, right: 10, top: 26, bottom: 18 };

// Where each series lies, as SVG paths; used by the page and by saved figures.
export function curveOf(maps, net, lam, row, width, height = HEIGHT) {
  const first = rowOf(maps.first, maps.length, row);
  const left = rowOf(net, maps.length, row);
  const value = maps.second ? lam ?? maps.lam[row] : 0;
  const taken = maps.second ? rowOf(maps.second, maps.length, row).map((weight) => value * weight) : null;
  let [low, high] = [0, 1e-9];
  for (const series of [first, left, taken ?? first]) {
    for (const weight of series) {
      if (weight < low) low = weight;
      if (weight > high) high = weight;
    }
  }
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const step = inner.width / maps.length;
  const x = (column) => MARGIN.left + (column + 0.5) * step;
  const y = (weight) => MARGIN.top + ((high - weight) / (high - low)) * inner.height;
  const line = (series) => `M${Array.from(series, (weight, i) => `${x(i).toFixed(1)},${y(weight).toFixed(1)}`).join("L")}`;
  const thick = Math.max(1, Math.min(14, step * 0.62));
  const bars = Array.from(left, (weight, i) => [x(i) - thick / 2, y(Math.max(0, weight)), thick, Math.abs(y(weight) - y(0)), weight]);
  const peaks = Array.from(left, (weight, i) => [Math.abs(weight), i])
    .sort((one, other) => other[0] - one[0])
    .slice(0, 4)
    .filter(([size]) => size > 0.08 * high)
    .map(([, i]) => i);
  // Labels that would stand on each other give way to the higher one.
  const labelled = peaks.filter((i, rank) => peaks.slice(0, rank).every((other) => Math.abs(x(i) - x(other)) > 56));
  return { first: line(first), taken: taken && line(taken), bars, zero: y(0), x, y, low, high, labelled, left, end: width - MARGIN.right };
}

export function RowCurve({ maps, net, lam, pieces, row, isPinned }) {
  const [container, width] = useWidth();
  const curve = width > 120 ? curveOf(maps, net, lam, row, width) : null;
  return html`
    <figure class="curve" ref=${container}>
      <figcaption>
        <span>Row of token ${row + 1} <b>${label(pieces[row] ?? "", 24)}</b>${isPinned ? html` <span class="quiet">pinned</span>` : ""}</span>
        ${maps.second && html`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${curve && html`
        <svg width=${width} height=${HEIGHT} role="img" aria-label=${describe(curve, pieces, row)}>
          <line class="axis" x1="44" x2=${curve.end} y1=${curve.zero} y2=${curve.zero} />
          <text class="tick" x="38" y=${curve.y(curve.high)} dy="0.32em" text-anchor="end">${number(curve.high, 2)}</text>
          <text class="tick" x="38" y=${curve.zero} dy="0.32em" text-anchor="end">0</text>
          ${curve.low < -0.12 * curve.high && html`<text class="tick" x="38" y=${curve.y(curve.low)} dy="0.32em" text-anchor="end">${number(curve.low, 2)}</text>`}
          ${curve.bars.map(([x, y, wide, high, weight], i) => html`<rect key=${i} class=${weight < 0 ? "net negative" : "net"} x=${x} y=${weight < 0 ? curve.zero : y} width=${wide} height=${high} />`)}
          <path class="first" d=${curve.first} />
          ${curve.taken && html`<path class="taken" d=${curve.taken} />`}
          ${curve.labelled.map((i) => html`<text key=${`l${i}`} class="peak" x=${Math.max(60, Math.min(curve.end - 20, curve.x(i)))}
            y=${curve.y(Math.max(curve.left[i], 0)) - 7} text-anchor="middle">${label(pieces[i] ?? "", 10)}</text>`)}
        </svg>`}
    </figure>`;
}

const describe = (curve, pieces, row) =>
  `What token ${row + 1} “${label(pieces[row] ?? "")}” attends to after the subtraction, most to ${curve.labelled
    .map((i) => `token ${i + 1} “${label(pieces[i] ?? "")}” with ${number(curve.left[i], 2)}`)
    .join(", ")}.`;
