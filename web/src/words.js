// Text of the page that depends on numbers and tokens.
import { rowOf } from "./decode.js";

const NAMES = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

// A piece of text with everything that cannot be seen replaced by something that can.
export const visible = (piece) =>
  [...piece]
    .map((letter) => {
      if (letter in NAMES) return NAMES[letter];
      const code = letter.codePointAt(0);
      if (code < 32) return String.fromCodePoint(0x2400 + code);
      if (code === 127) return "␡";
      // Controls of direction and width could reorder or hide what stands beside them.
      if (/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(letter)) return `⟨${code.toString(16).toUpperCase()}⟩`;
      return letter;
    })
    .join("");

// The same for a label, where a space is shown too and long pieces are cut.
export function label(piece, most = 14) {
  const text = visible(piece).replace(/^ +/, (spaces) => "␣".repeat(Math.min(3, spaces.length)));
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text || "∅";
}

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const isSmall = size < 10 ** -digits && value !== 0;
  const text = !isSmall ? value.toFixed(digits) : size < 0.001 ? value.toExponential(1) : value.toPrecision(2);
  return text.replace("-", "−");
}

// Of the predictions of a model, which reads a text or an image.
export const titleOf = ({ grid }) => (grid ? "Class" : "Next token");

export const place = (layer, head) => `${layer}.${head}`;

// Of a model whose heads fall into groups: the noise head whose map, A2, is subtracted from a head's own; and the head's name.
export const noiseHeadOf = ({ heads, noise_heads: noiseHeads }, head) => (noiseHeads ? Math.ceil((head * noiseHeads) / heads) : null);

export function nameInGroup(model, head) {
  const noiseHead = noiseHeadOf(model, head);
  if (noiseHead === null) return "";
  const ratio = model.heads / model.noise_heads;
  return `signal head ${head - (noiseHead - 1) * ratio} of noise head ${noiseHead}`;
}

// What a screen reader says of a map: where its largest weights lie.
export function describeMap(name, weights, maps, pieces) {
  const found = [];
  for (let row = 1; row < maps.length; row++) {
    const values = rowOf(weights, maps.length, row);
    let best = 0;
    for (let column = 1; column < values.length; column++) {
      if (Math.abs(values[column]) > Math.abs(values[best])) best = column;
    }
    found.push([Math.abs(values[best]), row, best, values[best]]);
  }
  found.sort((one, other) => other[0] - one[0]);
  const sentences = found
    .slice(0, 3)
    .map(([, row, column, weight]) => {
      const [from, to] = [row, column].map((i) => `token ${i + 1} “${label(pieces[i] ?? "")}”`);
      return `${from} gives ${number(weight, 2)} to ${to}`;
    });
  return `${name}, ${maps.length} by ${maps.length} weights. The largest after the first row: ${sentences.join("; ")}.`;
}
