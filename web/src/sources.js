// Where answers come from: the server that sent the page, or what the page itself holds.
import { fromBase64 } from "./decode.js";

export class Refusal extends Error {}

export class ServerSource {
  live = true;

  constructor(address = "api/") {
    this.address = address;
  }

  async #ask(name, question) {
    let response;
    try {
      response = await fetch(this.address + name, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(question),
      });
    } catch {
      throw new Refusal("The explorer does not answer; its command may have ended.");
    }
    if (!response.ok) {
      const answer = await response.json().catch(() => ({}));
      throw new Refusal(answer.error ?? `The explorer answered ${response.status}.`);
    }
    return response;
  }

  run = async (question) => (await this.#ask("run", question)).json();
  map = async (question) => (await this.#ask("map", question)).arrayBuffer();
  next = async (question) => (await this.#ask("next", question)).json();
  example = async (question) => (await this.#ask("example", question)).json();
}

// Runs that were recorded for one text: the learned λ, and steps of λ of all layers and of each.
export class RecordedSource {
  live = false;

  constructor(recorded) {
    this.recorded = recorded;
  }

  async run({ side, lambdas }) {
    const runs = this.recorded.runs[side];
    const set = lambdas ?? {};
    const near = (steps, value) =>
      steps.reduce((best, step) => (Math.abs(step.value - value) < Math.abs(best.value - value) ? step : best));
    const layers = Object.entries(set.layers ?? {});
    let step = null;
    if (layers.length && runs.layers[layers.at(-1)[0]]) step = near(runs.layers[layers.at(-1)[0]], layers.at(-1)[1]);
    else if (set.all !== null && set.all !== undefined) step = near(runs.all, set.all);
    if (!step) return runs.learned;
    return { ...runs.learned, ...step.run, recorded_at: step.value };
  }

  async map({ side, layer, head }) {
    return fromBase64(this.recorded.maps[side][`${layer}.${head}`]);
  }
}

// One question at a time; of those that come meanwhile only the last is asked.
export class Latest {
  #busy = false;
  #waiting = null;

  // `work` is an async function; it is not called where a later one comes first.
  ask(work) {
    if (this.#busy) {
      this.#waiting = work;
      return;
    }
    this.#busy = true;
    work().finally(() => {
      this.#busy = false;
      const next = this.#waiting;
      this.#waiting = null;
      if (next) this.ask(next);
    });
  }

  get waits() {
    return this.#waiting !== null;
  }
}
