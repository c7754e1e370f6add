// The text as tokens, or the image as patches, each coloured by how much the chosen one attends to it.
import { html } from "htm/preact";
import { useEffect, useRef } from "preact/hooks";
import { cssColour, inkOn } from "./colour.js";
import { useIds } from "./ids.js";
import { Patches } from "./patches.js";
import { number, visible } from "./words.js";

export function TokenFlow({ pieces, values, scale, theme, row, pinned, answer, added, between, image, onHover, onPin, onAnswer }) {
  const id = useIds();
  const list = useRef(null);
  const byKey = useRef(false);
  // The list scrolls, and takes the keys that would scroll it.
  const show = () => list.current.querySelector(".on")?.scrollIntoView({ block: "nearest" });
  useEffect(() => {
    if (byKey.current) show();
    byKey.current = false;
  }, [row]);
  const isAnswer = answer !== null && pinned >= answer.begin && pinned < answer.end;
  const move = (event) => {
    const down = !image ? 10 : row < image.others ? image.others - row : image.columns; // a row of patches
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -down, ArrowDown: down, Home: -pieces.length, End: pieces.length };
    const step = steps[event.key];
    if (event.key === "Escape" && pinned !== null) {
      onPin(pinned);
    } else if (step !== undefined) {
      event.preventDefault();
      const token = Math.max(0, Math.min(pieces.length - 1, row + step));
      byKey.current = true;
      onHover(null);
      if (token !== pinned) onPin(token);
    }
  };
  const tokenOf = (event) => {
    const token = event.target.closest("[data-token]");
    return token ? Number(token.dataset.token) : null;
  };
  const classes = (token) =>
    [
      "token",
      token === row && "on",
      token === pinned && "pinned",
      answer && token >= answer.begin && token < answer.end && "answer",
      token >= pieces.length - added && "new",
    ]
      .filter(Boolean)
      .join(" ");
  const tokens = pieces.map((piece, token) => {
    const weight = token < values.length ? values[token] : 0;
    const style = token < values.length
      ? { background: cssColour(weight, scale, theme), color: inkOn(weight, scale, theme) }
      : {};
    const isPatch = image && token >= image.others;
    return html`<span key=${token} id=${id(`token-${token}`)} class=${classes(token)} style=${style} role="option"
      data-token=${token} aria-selected=${token === row} aria-label=${isPatch ? `patch ${piece}` : null}
      title=${`${isPatch ? `patch ${piece}` : `token ${token + 1}`}: ${number(weight)}`}>${isPatch ? "" : visible(piece)}</span>${
      piece.includes("\n") ? html`<br />` : ""}`;
  });
  return html`
    <div class="flow-head">
      <span class="quiet">What token <b>${row + 1}</b> attends to. Hover a token or use the arrow keys; a click pins it${pinned !== null ? ", Esc lets go" : ""}.</span>
      ${onAnswer && pinned !== null && pinned < pieces.length - 1 && html`<button type="button" class="link"
          onClick=${() => onAnswer(isAnswer ? null : { query: pieces.length - 1, begin: pinned, end: pinned + 1 })}>${
          isAnswer ? "No longer the answer" : "Mark as the answer"}</button>`}
    </div>
    <div class=${`flow ${between || image ? "spaced" : ""}`} role="listbox" tabindex="0" onFocus=${show} aria-label=${image ? "Patches of the image" : "Tokens of the text"} ref=${list}
      aria-activedescendant=${id(`token-${row}`)} onKeyDown=${move} onPointerOver=${(event) => onHover(tokenOf(event))}
      onPointerLeave=${() => onHover(null)} onClick=${(event) => tokenOf(event) !== null && onPin(tokenOf(event))}>
      ${image ? html`${tokens.slice(0, image.others)}<${Patches} image=${image}>${tokens.slice(image.others)}<//>` : tokens}
    </div>`;
}
