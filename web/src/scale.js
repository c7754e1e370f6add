// The legend of the colours.
import { html } from "htm/preact";
import { useEffect, useRef } from "preact/hooks";
import { coloursOf } from "./colour.js";
import { number } from "./words.js";

export function Scale({ scale, theme }) {
  const canvas = useRef(null);
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const image = context.createImageData(511, 1);
    const colours = coloursOf(theme);
    for (let index = 0; index < 511; index++) {
      for (let channel = 0; channel < 3; channel++) image.data[4 * index + channel] = colours[3 * index + channel];
      image.data[4 * index + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  }, [theme]);
  const ticks = [-1, -0.25, 0, 0.25, 1];
  return html`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${number(scale, 2)} over the background at 0 to blue at ${number(scale, 2)}`}>
      <canvas ref=${canvas} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${ticks.map((tick) => html`<span key=${tick} style=${{ left: `${50 + 50 * Math.sign(tick) * Math.sqrt(Math.abs(tick))}%` }}>${
          Math.abs(tick) === 1 ? `${tick < 0 ? "≤ " : "≥ "}${number(tick * scale, 2)}` : number(tick * scale, 2)}</span>`)}
      </div>
    </div>`;
}
