// Reads the binary form of a head's maps, which src/diff_transformer/explorer/trace.py describes.

const HALVES = new Float32Array(1 << 16);
for (let bits = 0; bits < HALVES.length; bits++) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size = exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15);
  HALVES[bits] = bits >> 15 ? -size : size;
}

const triangle = (i) => (i * (i + 1)) / 2;

// Weights before row i of a map of N rows: a lower triangle if it is causal, else all N of each row.
const startOf = (weights, length, i) => (weights.length > triangle(length) ? i * length : triangle(i));

// → { length, lam, first, second }: λ of each row, and maps row by row. Without λ `second` is null.
// `earlier`, maps of the same head for the rows before, is what rows that were not sent are taken from.
export function decodeMaps(buffer, earlier = null) {
  const view = new DataView(buffer);
  if (view.getUint32(0) !== 0x44544d32) throw new Error("These are no attention maps.");
  const length = view.getUint32(4, true);
  const firstRow = view.getUint32(8, true);
  const count = view.getUint32(12, true);
  const size = view.getUint32(16, true) ? triangle(length) : length * length;
  let offset = 20;
  let lam = null;
  if (count === 2) {
    lam = new Float32Array(length);
    if (firstRow) lam.set(earlier.lam.subarray(0, firstRow));
    for (let row = firstRow; row < length; row++, offset += 4) lam[row] = view.getFloat32(offset, true);
  }
  const maps = ["first", "second"].slice(0, count).map((name) => {
    const weights = new Float32Array(size);
    const skipped = startOf(weights, length, firstRow);
    if (firstRow) weights.set(earlier[name].subarray(0, skipped));
    for (let i = skipped; i < weights.length; i++, offset += 2) weights[i] = HALVES[view.getUint16(offset, true)];
    return weights;
  });
  return { length, lam, first: maps[0], second: maps[1] ?? null };
}

// The same of the first rows alone, which is what a shorter text has.
export function firstRows(maps, length) {
  if (length === maps.length) return maps;
  const { lam, first, second } = maps;
  const weights = triangle(length);
  return {
    length,
    lam: lam?.subarray(0, length) ?? null,
    first: first.subarray(0, weights),
    second: second?.subarray(0, weights) ?? null,
  };
}

// A1 − λA2, or the one map; λ is each row's own unless a number replaces it.
export function difference(maps, lam = null) {
  if (!maps.second) return maps.first;
  const result = new Float32Array(maps.first.length);
  for (let row = 0, i = 0; row < maps.length; row++) {
    const value = lam ?? maps.lam[row];
    for (const end = startOf(result, maps.length, row + 1); i < end; i++) result[i] = maps.first[i] - value * maps.second[i];
  }
  return result;
}

// Row `i` of a map of `length` rows.
export const rowOf = (weights, length, i) => weights.subarray(startOf(weights, length, i), startOf(weights, length, i + 1));

// The weight that a scale ends at: the largest one, of causal maps but for the first quarter of the rows. These have few
// tokens to attend to, and their weights, up to 1, would leave no colours for the others.
export function scaleOf(length, ...maps) {
  let size = 0;
  for (const weights of maps) {
    const isCausal = weights.length <= triangle(length);
    for (let i = isCausal ? triangle(Math.floor(length / 4)) : 0; i < weights.length; i++) {
      const weight = Math.abs(weights[i]);
      if (weight > size) size = weight;
    }
  }
  return size || 1;
}

export function fromBase64(text) {
  const bytes = atob(text);
  const result = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) result[i] = bytes.charCodeAt(i);
  return result.buffer;
}
