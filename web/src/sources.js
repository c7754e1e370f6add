// Where answers come from: the server that sent the page. recorded_source.js and widget_source.js have other sources.
import { decodeMaps } from "./decode.js";

export class Refusal extends Error {}

export class ServerSource {
  live = true;
  hasAddress = true;

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
  // `earlier` are maps of the rows before "first_row".
  map = async (question, earlier) => decodeMaps(await (await this.#ask("map", question)).arrayBuffer(), earlier);
  next = async (question) => (await this.#ask("next", question)).json();
  example = async (question) => (await this.#ask("example", question)).json();
  strip = async (question) => (await this.#ask("strip", question)).json();
}

// One question at a time; of those that come meanwhile only the last is asked.
export class Latest {
  #busy = false;
  #waiting = null;

  // The question that is asked now, as a promise.
  answered = Promise.resolve();

  // `work` is an async function; it is not called where a later one comes first.
  ask(work) {
    if (this.#busy) {
      this.#waiting = work;
      return;
    }
    this.#busy = true;
    this.answered = work().finally(() => {
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
