// The two buttons of a view that save it.
import { html } from "htm/preact";

export const SaveButtons = ({ disabled, onSave }) =>
  ["PNG", "SVG"].map(
    (kind) => html`<button type="button" key=${kind} class="link" disabled=${disabled} onClick=${() => onSave(kind.toLowerCase())}>${kind}</button>`,
  );
