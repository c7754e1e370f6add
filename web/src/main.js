// Begins the page: with the data that stand in it, or as a widget of a notebook.
import { render } from "preact";
import { html } from "htm/preact";
import { App } from "./app.js";
import { RecordedSource, ServerSource } from "./sources.js";
import "./style.css";

export function show(element, data, source) {
  element.classList.add("explorer");
  render(html`<${App} data=${data} source=${source} />`, element);
}

const embedded = document.getElementById("explorer-data");
if (embedded) {
  const data = JSON.parse(embedded.textContent);
  const source = data.mode === "recorded" ? new RecordedSource(data.recorded) : new ServerSource();
  show(document.getElementById("explorer"), data, source);
}
