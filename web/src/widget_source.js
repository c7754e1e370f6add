// Answers from the notebook's kernel, by the messages of anywidget.
import { decodeMaps } from "./decode.js";
import { Refusal } from "./sources.js";

export class WidgetSource {
  live = true;
  hasAddress = false; // the address is the notebook's
  #waiting = new Map();
  #count = 0;

  constructor(model) {
    this.model = model;
    model.on("msg:custom", ({ id, error, answer }, buffers) => {
      const waiting = this.#waiting.get(id);
      if (!waiting) return; // an answer to another view of the widget
      this.#waiting.delete(id);
      if (error) waiting.reject(new Refusal(error));
      else waiting.resolve(buffers?.length ? bytesOf(buffers[0]) : answer);
    });
  }

  #ask(name, question) {
    const id = `${this.#count++} ${Math.random()}`;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.model.send({ id, name, question });
    });
  }

  run = (question) => this.#ask("run", question);
  map = async (question, earlier) => decodeMaps(await this.#ask("map", question), earlier);
  next = (question) => this.#ask("next", question);
  example = (question) => this.#ask("example", question);
  strip = (question) => this.#ask("strip", question);
}

// A DataView, as Jupyter gives it, or an array → an ArrayBuffer of its bytes alone.
const bytesOf = (view) =>
  view instanceof ArrayBuffer ? view : view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
