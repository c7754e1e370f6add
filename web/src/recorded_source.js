// Answers that a saved page holds itself, as src/diff_transformer/explorer/page.py recorded them: for one text
// and what the models wrote after it, the maps with the learned λ, and runs where one λ was moved in steps.
import { decodeMaps, difference, firstRows, fromBase64, rowOf, scaleOf } from "./decode.js";
import { pooledExtremes } from "./draw.js";
import { AS_LEARNED, NOTHING_ADDED, changed, ownLambda } from "./view_state.js";

const nearest = (steps, value) =>
  steps.reduce((best, step) => (Math.abs(step.value - value) < Math.abs(best.value - value) ? step : best));

const sum = (weights) => weights.reduce((total, weight) => total + weight, 0);

export class RecordedSource {
  live = false;
  hasAddress = location.protocol !== "about:"; // in a frame that holds the page itself, the address is another's
  #decoded = new Map();

  constructor({ recorded, models, examples, strip }) {
    this.recorded = recorded;
    this.models = models;
    [this.example] = examples;
    this.measured = strip;
  }

  // What of a view, which may come from a link, this page can show.
  shown(view) {
    const added = Object.fromEntries(
      Object.entries(this.recorded).map(([side, { tokens, runs }]) => {
        const written = tokens.slice(tokens.length - runs.length + 1);
        return [side, written.slice(0, view.added[side].length)];
      }),
    );
    const { text, answer } = this.example;
    return { ...view, text, answer, added: changed(view.lambdas) ? NOTHING_ADDED : { ...NOTHING_ADDED, ...added } };
  }

  async run({ side, append = [], lambdas, answer, picture }) {
    const { tokens, pieces, learned_lambdas, runs, moved } = this.recorded[side];
    const length = tokens.length - runs.length + 1 + append.length;
    const run = { tokens: tokens.slice(0, length), pieces: pieces.slice(0, length), learned_lambdas, ...runs[append.length] };
    if (lambdas) {
      const { factor, layers, heads } = lambdas;
      const places = Object.entries({ ...(factor === 1 ? {} : { factor }), ...layers, ...heads });
      const [place, value] = places[0];
      if (places.length > 1 || !(place in moved)) {
        run.is_recorded = false;
      } else {
        const step = nearest(moved[place], value);
        Object.assign(run, step.run, { recorded_at: step.value });
      }
    }
    if (picture) run.heads = this.#heads(side, length, lambdas, answer, picture);
    return run;
  }

  async map({ side, append = [], layer, head, lambdas }) {
    const { tokens, runs } = this.recorded[side];
    return firstRows(this.#maps(side, layer, head, lambdas), tokens.length - runs.length + 1 + append.length);
  }

  async next({ side, append = [] }) {
    const { tokens, runs } = this.recorded[side];
    return { token: tokens[tokens.length - runs.length + 1 + append.length] };
  }

  strip = async ({ factor }) => this.measured.points[this.measured.factors.indexOf(factor)];

  // The numbers and pictures of all heads, as the server computes them, from the maps of the learned λ.
  #heads(side, length, lambdas, answer, most) {
    const { layers, heads, subtracts } = this.models[side];
    const size = Math.min(most, length);
    const pictures = new Int8Array(layers * heads * size * size);
    const rollout = lambdas ? null : this.recorded[side].rollout;
    const result = { rollout, removed: subtracts ? [] : null, on_answer: answer ? [] : null, picture_size: size, pictures };
    for (let layer = 1, index = 0; layer <= layers; layer++) {
      result.removed?.push([]);
      result.on_answer?.push([]);
      for (let head = 1; head <= heads; head++, index++) {
        const maps = firstRows(this.#maps(side, layer, head, lambdas), length);
        const net = difference(maps, ownLambda(lambdas ?? AS_LEARNED, { layer, head }));
        if (subtracts) {
          let removed = 0;
          for (let i = 0; i < net.length; i++) removed += Math.max(0, Math.min(maps.first[i], maps.first[i] - net[i]));
          result.removed.at(-1).push(removed / length);
        }
        if (answer) {
          const sizes = rowOf(net, length, answer.query).map(Math.abs);
          result.on_answer.at(-1).push(sum(sizes.subarray(answer.begin, answer.end)) / (sum(sizes) || 1));
        }
        const scale = scaleOf(length, net);
        const extremes = pooledExtremes(net, length, size);
        const picture = extremes.map((weight) => Math.round(127 * Math.sign(weight) * Math.sqrt(Math.min(1, Math.abs(weight) / scale))));
        pictures.set(picture, index * size * size);
      }
    }
    return result;
  }

  #maps(side, layer, head, { factor } = AS_LEARNED) {
    const key = `${side} ${layer}.${head}`;
    if (!this.#decoded.has(key)) {
      this.#decoded.set(key, decodeMaps(fromBase64(this.recorded[side].maps[`${layer}.${head}`])));
    }
    const { lam, ...maps } = this.#decoded.get(key);
    return { ...maps, lam: lam?.map((value) => factor * value) };
  }
}
