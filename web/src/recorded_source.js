// Answers that a saved page holds itself: for one text, the maps with the learned λ, and what the model predicts with the
// learned λ, with steps of λ of all layers, and with steps of each layer.
import { decodeMaps, difference, fromBase64, rowOf, scaleOf } from "./decode.js";
import { pooledExtremes } from "./draw.js";
import { changed, lambdaOf } from "./view_state.js";

const nearest = (steps, value) =>
  steps.reduce((best, step) => (Math.abs(step.value - value) < Math.abs(best.value - value) ? step : best));

export class RecordedSource {
  live = false;
  hasAddress = true;
  #decoded = new Map();

  constructor(recorded, models) {
    this.recorded = recorded;
    this.models = models;
  }

  async run({ side, lambdas, answer, picture }) {
    const { learned, all, layers } = this.recorded.runs[side];
    const { heads, ...run } = learned;
    const moved = lambdas && changed(lambdas) ? lambdas : null;
    const layer = Object.keys(moved?.layers ?? {}).at(-1);
    let step = null;
    if (layer !== undefined) step = nearest(layers[layer], moved.layers[layer]);
    else if (moved && moved.all !== null) step = nearest(all, moved.all);
    if (step) Object.assign(run, step.run, { recorded_at: step.value });
    if (picture) run.heads = moved ? this.#heads(side, moved, answer, heads.picture_size) : heads;
    return run;
  }

  async map({ side, layer, head }) {
    return fromBase64(this.recorded.maps[side][`${layer}.${head}`]);
  }

  // The numbers and pictures of all heads with another λ, from the maps of the learned one; as the server computes them.
  #heads(side, lambdas, answer, size) {
    const { layers, heads } = this.models[side];
    const result = { removed: [], on_answer: answer ? [] : null, picture_size: size, pictures: new Int8Array(layers * heads * size * size) };
    for (let layer = 1, index = 0; layer <= layers; layer++) {
      result.removed.push([]);
      result.on_answer?.push([]);
      for (let head = 1; head <= heads; head++, index++) {
        const maps = this.#maps(side, layer, head);
        const lam = lambdaOf(lambdas, { layer, head });
        const net = difference(maps, lam);
        let removed = 0;
        for (let i = 0; i < net.length; i++) removed += Math.max(0, Math.min(maps.first[i], maps.first[i] - net[i]));
        result.removed.at(-1).push(removed / maps.length);
        if (answer) {
          const sizes = rowOf(net, answer.query).map(Math.abs);
          const sum = (weights) => weights.reduce((total, weight) => total + weight, 0);
          result.on_answer.at(-1).push(sum(sizes.subarray(answer.begin, answer.end)) / (sum(sizes) || 1));
        }
        const scale = scaleOf(maps.length, net);
        const extremes = pooledExtremes(net, maps.length, size);
        const picture = extremes.map((weight) => Math.round(127 * Math.sign(weight) * Math.sqrt(Math.min(1, Math.abs(weight) / scale))));
        result.pictures.set(picture, index * size * size);
      }
    }
    return result;
  }

  #maps(side, layer, head) {
    const key = `${side} ${layer}.${head}`;
    if (!this.#decoded.has(key)) {
      this.#decoded.set(key, decodeMaps(fromBase64(this.recorded.maps[side][`${layer}.${head}`])));
    }
    return this.#decoded.get(key);
  }
}
