// One head in full: its maps side by side on one scale, the tokens, and the row of one token as a curve.
import { html } from "htm/preact";
import { useMemo } from "preact/hooks";
import { difference, rowOf, scaleOf } from "./decode.js";
import { useIds } from "./ids.js";
import { MapPanel } from "./map_panel.js";
import { Rollouts } from "./patches.js";
import { RowCurve } from "./row_curve.js";
import { saveHead } from "./save.js";
import { SaveButtons } from "./save_buttons.js";
import { Scale } from "./scale.js";
import { TokenFlow } from "./token_flow.js";
import { useWidth } from "./use_width.js";
import { changed, ownLambda, toHash } from "./view_state.js";
import { nameInGroup, noiseHeadOf, number, place } from "./words.js";

// GQA: which heads use the same keys and values.
function group({ heads, kv_heads: kvHeads }, { head }) {
  if (kvHeads === heads) return "";
  const size = heads / kvHeads;
  const number = Math.ceil(head / size);
  return `shares key/value head ${number} with heads ${(number - 1) * size + 1}–${number * size}`.replace(
    /heads (\d+)–\1$/,
    "head $1",
  );
}

export function HeadView({ models, runs, maps, view, image, theme, row, hovered, shared, onHover, onChange, live, hasAddress }) {
  const id = useIds();
  const [container, width] = useWidth();
  const [left, right] = [maps.left, maps.right];
  const isOfHead = left && left.head.layer === view.left.layer && left.head.head === view.left.head;
  const own = models.left.subtracts ? ownLambda(view.lambdas, view.left) : null;
  // While the server computes, the difference follows the slider with the maps that are there. A λ for every token is
  // known from the server alone.
  const learned = models.left.lambda_per_token ? undefined : runs.left?.learned_lambdas?.[view.left.layer - 1][view.left.head - 1];
  const lam = isOfHead ? own ?? (learned === undefined ? null : view.lambdas.factor * learned) : null;
  const net = useMemo(() => (left ? difference(left, lam) : null), [left, lam]);
  const scale = useMemo(
    () => (left ? Math.max(scaleOf(left.length, left.first, left.second ?? [], net), right ? scaleOf(right.length, right.first) : 0) : 1),
    [left, right, net],
  );
  const pieces = { left: runs.left?.pieces ?? [], right: runs.right?.pieces ?? [] };
  const shown = left ? lam ?? left.lam?.[Math.min(row, left.length - 1)] : null;
  const headName = place(view.left.layer, view.left.head);

  const panels = [];
  if (left?.second) {
    const noiseHead = noiseHeadOf(models.left, left.head.head);
    const second = noiseHead === null ? "A₂" : `A₂ of noise head ${noiseHead}`;
    panels.push({ key: "first", name: "A₁", side: "left", maps: left, weights: left.first });
    panels.push({ key: "second", name: second, side: "left", maps: left, weights: left.second });
    panels.push({ key: "net", name: "A₁ − λA₂", side: "left", maps: left, weights: net, strong: true });
  }
  if (right) {
    const name = `${models.right.label} ${place(right.head.layer, right.head.head)}`;
    panels.push({ key: "right", name, side: "right", maps: right, weights: right.first });
  }

  const columns = width >= (panels.length === 3 ? 540 : 700) ? panels.length : Math.min(2, panels.length);
  const gap = width >= 860 ? 20 : 12;
  const side = Math.max(0, Math.floor((width - gap * (columns - 1)) / Math.max(1, columns)));
  const pin = (token) => onChange((now) => ({ row: now.row === token ? null : token }));
  const notes = [nameInGroup(models.left, view.left.head), group(models.left, view.left)];
  if (models.left.lambda_per_token) notes.push("a λ for every token");
  const details = { models, view, panels, pieces, row, scale, lam: shown, theme, left, net, right };

  return html`
    <section class="card head-view" aria-labelledby=${id("head-title")}>
      <div class="card-head">
        <h2 id=${id("head-title")}>
          Layer ${view.left.layer}, head ${view.left.head}
          ${shown !== null && shown !== undefined && html` <span class="quiet">λ = ${number(shown, 2)}</span>`}
          ${notes.filter(Boolean).map((note) => html` <span class="quiet note">${note}</span>`)}
        </h2>
        <span class="buttons">
          ${hasAddress && html`<button type="button" class="link" onClick=${() => navigator.clipboard?.writeText(location.href.split("#")[0] + toHash(view))}>Copy link</button>`}
          <${SaveButtons} disabled=${!left} onSave=${(kind) => saveHead(details, kind)} />
        </span>
      </div>
      <div ref=${container} class="panels" style=${{ gridTemplateColumns: `repeat(${columns || 1}, 1fr)`, gap: `${gap}px` }}>
        ${side > 0 && panels.map((panel) => html`
          <${MapPanel} key=${panel.key} panel=${panel} pieces=${pieces[panel.side]} size=${side} hasStrip=${side >= 200 || columns > 2} scale=${scale} theme=${theme}
            row=${Math.min(row, panel.maps.length - 1)} answer=${panel.side === "left" || shared ? view.answer : null}
            added=${view.added[panel.side].length} head=${panel.side === "left" ? headName : null}
            onHover=${onHover} onPin=${pin} />`)}
      </div>
      <${Scale} scale=${scale} theme=${theme} />
      ${left && html`
        <${TokenFlow} pieces=${pieces.left.slice(0, left.length)} values=${rowOf(net, left.length, Math.min(row, left.length - 1))} scale=${scale} theme=${theme}
          between=${models.left.between} row=${Math.min(row, left.length - 1)} pinned=${view.row} answer=${view.answer} added=${view.added.left.length}
          image=${image} onHover=${onHover} onPin=${pin} onAnswer=${live && !image ? (answer) => onChange({ answer }) : null} />
        ${image && html`<${Rollouts} models=${models} runs=${runs} image=${image} row=${row} theme=${theme} />`}
        <${RowCurve} maps=${left} net=${net} lam=${lam} pieces=${pieces.left} row=${Math.min(row, left.length - 1)}
          isPinned=${view.row !== null && hovered === null} />`}
      ${!live && changed(view.lambdas) &&
      html`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the live explorer computes them anew.</p>`}
    </section>`;
}
