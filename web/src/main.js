// Begins the page: with the data that stand in it, or as a widget of a notebook (anywidget calls `render`).
import { render as renderInto } from "preact";
import { html } from "htm/preact";
import { App } from "./app.js";
import { IdPrefix } from "./ids.js";
import { RecordedSource } from "./recorded_source.js";
import { ServerSource } from "./sources.js";
import { WidgetSource } from "./widget_source.js";
import "./style.css";

function show(element, data, source, idPrefix = "") {
  element.classList.add("explorer");
  const app = html`<${App} data=${data} source=${source} root=${element} />`;
  renderInto(html`<${IdPrefix.Provider} value=${idPrefix}>${app}<//>`, element);
}

function render({ model, el }) {
  // Or JupyterLab would take keys for its own: B adds a cell. It looks for this at the element that has the focus.
  el.addEventListener("focusin", ({ target }) => (target.dataset.lmSuppressShortcuts = "true"));
  show(el, model.get("described"), new WidgetSource(model), `explorer-${Math.random().toString(36).slice(2)}-`);
  return () => renderInto(null, el);
}

export default { render };

const embedded = document.getElementById("explorer-data");
if (embedded) {
  const data = JSON.parse(embedded.textContent);
  const source = data.mode === "recorded" ? new RecordedSource(data) : new ServerSource();
  show(document.getElementById("explorer"), data, source);
}
