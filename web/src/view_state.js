// What the reader looks at, and the part of the address after "#" that says so.

export const NOTHING_ADDED = { left: [], right: [] };

// All λ are the learned ones times the factor, but for those of layers and heads that have their own.
export const AS_LEARNED = { factor: 1, layers: {}, heads: {} };

export const FIRST_VIEW = {
  text: "",
  added: NOTHING_ADDED, // tokens that were generated after the text
  answer: null,
  lambdas: AS_LEARNED,
  left: { layer: 1, head: 1 },
  right: { layer: 1, head: 1 },
  row: null, // the pinned token, counted from 0
};

const two = ({ layer, head }) => `${layer}.${head}`;
const numbers = (text) => text.split(",").filter(Boolean).map(Number);

export function toHash(view) {
  const parameters = new URLSearchParams();
  parameters.set("text", view.text);
  for (const side of ["left", "right"]) {
    parameters.set(side, two(view[side]));
    if (view.added[side].length) parameters.set(`${side}-added`, view.added[side].join(","));
  }
  const { factor, layers, heads } = view.lambdas;
  const lambdas = [
    ...(factor === 1 ? [] : [["factor", factor]]),
    ...Object.entries(layers),
    ...Object.entries(heads),
  ];
  if (lambdas.length) parameters.set("lambda", lambdas.map(([where, value]) => `${where}:${value}`).join(","));
  if (view.answer) parameters.set("answer", [view.answer.query, view.answer.begin, view.answer.end].join(","));
  if (view.row !== null) parameters.set("row", view.row);
  return `#${parameters}`;
}

// The view of an address; whatever in it makes no sense is left out. `models` are those that there are.
export function fromHash(hash, first, models) {
  const parameters = new URLSearchParams(hash.slice(1));
  if (!parameters.has("text")) return first;
  const view = { ...first, text: parameters.get("text"), answer: null, row: null, added: { ...NOTHING_ADDED } };
  for (const side of ["left", "right"]) {
    const [layer, head] = (parameters.get(side) ?? "").split(".").map(Number);
    const sizes = models[side];
    if (sizes && layer >= 1 && layer <= sizes.layers && head >= 1 && head <= sizes.heads) {
      view[side] = { layer: Math.floor(layer), head: Math.floor(head) };
    }
    const added = numbers(parameters.get(`${side}-added`) ?? "");
    if (added.every(Number.isInteger)) view.added[side] = added;
  }
  view.lambdas = { factor: 1, layers: {}, heads: {} };
  for (const entry of (parameters.get("lambda") ?? "").split(",")) {
    const [where, text] = entry.split(":");
    const value = Number(text);
    if (text === undefined || !Number.isFinite(value)) continue;
    if (where === "factor") view.lambdas.factor = value;
    else if (/^\d+$/.test(where)) view.lambdas.layers[where] = value;
    else if (/^\d+\.\d+$/.test(where)) view.lambdas.heads[where] = value;
  }
  const answer = numbers(parameters.get("answer") ?? "");
  if (answer.length === 3 && answer.every(Number.isInteger)) {
    view.answer = { query: answer[0], begin: answer[1], end: answer[2] };
  }
  const row = Number(parameters.get("row") ?? NaN);
  if (Number.isInteger(row) && row >= 0) view.row = row;
  return view;
}

// λ that a head or its layer has of its own, or null where it is the learned one times the factor.
export const ownLambda = ({ layers, heads }, { layer, head }) => heads[`${layer}.${head}`] ?? layers[layer] ?? null;

export const changed = ({ factor, layers, heads }) =>
  factor !== 1 || Object.keys(layers).length > 0 || Object.keys(heads).length > 0;
