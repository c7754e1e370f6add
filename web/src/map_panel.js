// One map on a canvas, with strips of tokens above and to the left of it.
import { html } from "htm/preact";
import { useEffect, useRef } from "preact/hooks";
import { paintMap } from "./draw.js";
import { describeMap, label } from "./words.js";

const STRIP = 46; // pixels of the strips, where there is room for them
const LINE = 11; // pixels that a label needs

export function MapPanel({ panel, pieces, size, hasStrip, scale, theme, row, answer, added, onHover, onPin }) {
  const canvas = useRef(null);
  const { maps, weights, name } = panel;
  useEffect(() => {
    paintMap(canvas.current, weights, maps.length, scale, theme);
  }, [weights, maps.length, scale, theme]);

  const strip = hasStrip ? STRIP : 0;
  const side = size - strip;
  const cell = side / maps.length;
  const every = Math.max(1, Math.ceil(LINE / cell));
  const shown = [];
  if (strip) {
    for (let token = 0; token < maps.length; token += every) shown.push(token);
  }
  const rowAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const token = Math.floor(((event.clientY - box.top) / box.height) * maps.length);
    return Math.max(0, Math.min(maps.length - 1, token));
  };
  const middle = (token) => strip + (token + 0.5) * cell;
  const hasAnswer = answer && answer.end <= maps.length;

  return html`
    <figure class=${`map ${panel.strong ? "strong" : ""}`}>
      <figcaption>${name}</figcaption>
      <div class="map-box" style=${{ width: `${size}px`, height: `${size}px` }}>
        <canvas ref=${canvas} width="8" height="8" role="img" aria-label=${describeMap(name, weights, maps, pieces)}
          data-map=${panel.key} style=${{ left: `${strip}px`, top: `${strip}px`, width: `${side}px`, height: `${side}px` }}
          onPointerMove=${(event) => onHover(rowAt(event))} onPointerLeave=${() => onHover(null)}
          onClick=${(event) => onPin(rowAt(event))}></canvas>
        <svg width=${size} height=${size} aria-hidden="true">
          ${shown.map((token) => html`
            <text key=${`r${token}`} x=${strip - 4} y=${middle(token)} class=${token === row ? "on" : ""} dy="0.32em"
              text-anchor="end">${label(pieces[token] ?? "", 7)}</text>
            <text key=${`c${token}`} transform=${`translate(${middle(token)} ${strip - 4}) rotate(-90)`} dy="0.32em">${
              label(pieces[token] ?? "", 7)}</text>`)}
          ${hasAnswer && html`<rect class="answer" x=${strip + answer.begin * cell} y=${strip}
            width=${Math.max(1.5, (answer.end - answer.begin) * cell)} height=${side} />`}
          ${added > 0 && html`<line class="added" x1=${strip} x2=${size} y1=${strip + (maps.length - added) * cell}
            y2=${strip + (maps.length - added) * cell} />`}
          <rect class="row" x=${strip} y=${strip + row * cell} width=${side} height=${Math.max(2, cell)} />
        </svg>
      </div>
    </figure>`;
}
