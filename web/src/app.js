// The whole page: what the reader looks at, the answers that belong to it, and the parts that show them.
import { html } from "htm/preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { themeNow } from "./colour.js";
import { Generation } from "./generation.js";
import { HeadGrid } from "./head_grid.js";
import { HeadView } from "./head_view.js";
import { LambdaPanel } from "./lambda_panel.js";
import { ImagePanel, imageOf } from "./patches.js";
import { Predictions } from "./predictions.js";
import { Latest } from "./sources.js";
import { Strip } from "./strip.js";
import { TextPanel } from "./text_panel.js";
import { FIRST_VIEW, changed, fromHash, toHash } from "./view_state.js";

const PICTURE = { few: 48, many: 32 };
const ADDRESS_DELAY = 300; // milliseconds

function useTheme() {
  const [theme, setTheme] = useState(themeNow);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const follow = () => setTheme(themeNow());
    query.addEventListener("change", follow);
    return () => query.removeEventListener("change", follow);
  }, []);
  return theme;
}

function firstView(data, hash) {
  const example = data.examples[0];
  const view = { ...FIRST_VIEW, text: example?.text ?? "", answer: example?.answer ?? null };
  if (data.opening) {
    view.left = data.opening;
    if (data.models.right && !view.answer) view.right = besides(data.opening, data.models.right);
  }
  return fromHash(hash, view, data.models);
}

// A Transformer without an answer to look at has no head that is worth a first look: the one in the same place.
const besides = ({ layer, head }, { layers, heads }) => ({ layer: Math.min(layer, layers), head: Math.min(head, heads) });

// The head that is worth a first look where it is not known where λ matters most: of which most lies on the answer, or from which most is removed.
function striking({ on_answer: onAnswer, removed }) {
  const numbers = onAnswer ?? removed;
  if (!numbers) return null;
  let best = { layer: 1, head: 1, number: -1 };
  numbers.forEach((row, layer) =>
    row.forEach((number, head) => {
      if (number > best.number) best = { layer: layer + 1, head: head + 1, number };
    }),
  );
  return { layer: best.layer, head: best.head };
}

export function App({ data, source, root }) {
  const { models } = data;
  const sides = Object.keys(models);
  const theme = useTheme();
  const hash = source.hasAddress ? location.hash : "";
  const [wanted, setView] = useState(() => firstView(data, hash));
  const view = source.shown?.(wanted) ?? wanted;
  const [runs, setRuns] = useState({});
  const [maps, setMaps] = useState({});
  const [points, setPoints] = useState({}); // of the strip, by the factor of λ
  const [refusal, setRefusal] = useState(null);
  const [hovered, setHovered] = useState(null);
  const latest = useMemo(
    () => Object.fromEntries(["left", "right"].map((side) => [side, { run: new Latest(), map: new Latest() }])),
    [],
  );
  const shownMaps = useRef({});
  const isRefused = useRef(false); // the text, by the model on the left
  const isChosen = useRef(hash.length > 1 ? { left: true, right: true } : { left: Boolean(data.opening) });

  const change = useCallback((part) => setView((now) => ({ ...now, ...(part instanceof Function ? part(now) : part) })), []);

  const question = (side) => {
    const asked = { side, text: view.text };
    if (view.added[side].length) asked.append = view.added[side];
    if (side === "left" && changed(view.lambdas)) asked.lambdas = view.lambdas;
    return asked;
  };
  const answered = (side) => (view.answer && (side === "left" || data.shared_vocabulary) ? { answer: view.answer } : {});

  for (const side of sides) {
    const asked = question(side);
    const run = { ...asked, ...answered(side) };
    // The answer of an address may lie past the text: without it the text is shown, or refused for what is wrong with it.
    const ask = ({ answer, ...rest }) =>
      source.run(answer ? { ...rest, answer } : rest).catch(async (error) => {
        if (!answer) throw error;
        const found = await source.run(rest);
        if (side === "left") change((now) => (now.answer === answer ? { answer: null } : {}));
        return found;
      });
    useEffect(() => {
      const size = models[side].layers * models[side].heads > 64 ? PICTURE.many : PICTURE.few;
      const wait = (waitsForHeads) => setRuns((now) => ({ ...now, [side]: now[side] && { ...now[side], waitsForHeads } }));
      wait(true);
      latest[side].run.ask(async () => {
        try {
          // The models run one at a time: the differential one's heads come first.
          if (side === "right") await latest.left.run.answered;
          // Nor does the right show a text that the left refuses.
          if (side === "right" && isRefused.current) {
            wait(false);
            return;
          }
          const quick = await ask(run);
          if (side === "left") isRefused.current = false;
          setRefusal((now) => (now?.side === side ? null : now));
          // The pictures of the heads before stay until there are new ones.
          setRuns((now) => ({ ...now, [side]: { heads: now[side]?.heads, ...quick, asked, waitsForHeads: !quick.heads } }));
          if (latest[side].run.waits || quick.heads) return;
          const whole = await ask({ ...run, picture: size });
          setRuns((now) => ({ ...now, [side]: { ...whole, asked } }));
          const first = isChosen.current[side] ? null : striking(whole.heads);
          if (first) isChosen.current[side] = true;
          if (!first) return;
          change({ [side]: first });
          if (side === "left" && models.right && !view.answer && !isChosen.current.right) {
            change({ right: besides(first, models.right) });
          }
        } catch (error) {
          wait(false);
          if (side === "left") isRefused.current = true;
          // Beside a new text on the left, nothing of the one before.
          if (side === "right") {
            setRuns(({ right: _, ...others }) => others);
            setMaps(({ right: _, ...others }) => others);
            shownMaps.current.right = undefined;
          }
          setRefusal({ side, message: error.message });
        }
      });
    }, [JSON.stringify(run)]);

    const head = view[side];
    useEffect(() => {
      latest[side].map.ask(async () => {
        try {
          if (side === "right") await latest.left.run.answered;
          if (side === "right" && isRefused.current) return;
          const { append, ...base } = asked;
          const key = JSON.stringify([base, head]);
          const before = shownMaps.current[side];
          const grows = before?.key === key && before.append.every((token, i) => append?.[i] === token);
          const firstRow = grows && append?.length > before.append.length ? before.maps.length : 0;
          const place = { ...asked, layer: head.layer, head: head.head };
          const decoded = await source.map(firstRow ? { ...place, first_row: firstRow } : place, before?.maps);
          shownMaps.current[side] = { key, append: append ?? [], maps: decoded };
          setMaps((now) => ({ ...now, [side]: { ...decoded, head } }));
          setRefusal((now) => (now?.side === side && now.ofMap ? null : now));
        } catch (error) {
          // The run of the same text says why, where it is refused, too.
          setRefusal((now) => now ?? { side, message: error.message, ofMap: true });
        }
      });
    }, [JSON.stringify([asked, head])]);
  }

  // A point after the other, so that an answer that the reader waits for waits for one of them at most.
  const { factors, task } = data.strip;
  const { lambdas: _, ...stripped } = { ...question("left"), ...answered("left") };
  useEffect(() => {
    let isOver = false;
    (async () => {
      for (const factor of factors) {
        await latest.left.run.answered;
        const point = isOver ? null : await source.strip({ ...stripped, factor });
        if (isOver) return;
        // Those of the text before stay until there are new ones.
        setPoints((now) => (factor === factors[0] ? {} : now));
        if (point.value === null) return;
        setPoints((now) => ({ ...now, [factor]: point }));
      }
    })().catch(() => {}); // the run of the same text says why
    return () => (isOver = true);
  }, [task ? null : JSON.stringify(stripped)]);

  const left = runs.left;
  const length = left?.tokens.length ?? 0;
  const isOfOtherText = left && left.asked.text !== view.text;
  const image = imageOf(data, view);
  // Without a pinned token the row that was generated last is shown, or that of the question; of an image the first.
  const ownRow = image ? 0 : view.added.left.length ? length - 1 : view.answer?.query ?? length - 1;
  const row = Math.max(0, Math.min(hovered ?? view.row ?? ownRow, length - 1));

  useEffect(() => {
    root.dataset.theme = theme;
    const isBeside = !models.right || maps.right || refusal?.side === "right";
    root.dataset.ready = String(Boolean(left?.heads && maps.left && isBeside));
  });
  // Not at every step of a slider: browsers refuse more than some hundred changes of the address in half a minute.
  useEffect(() => {
    if (!source.hasAddress) return undefined;
    const timer = setTimeout(() => history.replaceState(null, "", toHash(view)), ADDRESS_DELAY);
    return () => clearTimeout(timer);
  }, [toHash(view)]);

  useEffect(() => {
    if (!source.hasAddress) return undefined;
    const follow = () => setView((now) => fromHash(location.hash, now, models)); // a link within the page, or a typed one
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  // Hundreds of heads are compared with what the page shows where they have changed, and not at every hovered token.
  const grids = sides.map((side) => {
    const { heads, waitsForHeads } = runs[side] ?? {};
    const { layer, head } = view[side];
    const isBusy = refusal?.side !== side && (!heads || Boolean(waitsForHeads));
    return useMemo(() => {
      const choose = (place) => {
        isChosen.current[side] = true;
        change({ [side]: place });
      };
      return html`<${HeadGrid} key=${side} side=${side} model=${models[side]} heads=${heads} isBusy=${isBusy} chosen=${{ layer, head }}
        theme=${theme} onChoose=${choose} />`;
    }, [heads, isBusy, layer, head, theme]);
  });
  const setLambdas = (lambdas) => change({ lambdas });

  return html`
    <header class="top">
      ${data.pairs?.length > 1 && html`<nav class="pairs" aria-label="Models">
        <span class="quiet">Models</span>
        ${data.pairs.map(({ name, address }) => html`<a key=${name} href=${address}
            aria-current=${location.pathname === address ? "page" : null}>${name}</a>`)}
      </nav>`}
      <h1>What the second map does</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the ${image ? "image" : "text"} twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        <strong>Move λ</strong> and watch what the model attends to, ${image ? "which class it sees" : "what it would write next"}, and how well it does.
      </p>
      ${models.left.note && html`<p class="note">${models.left.note}</p>`}
    </header>
    ${refusal && html`<p class="refusal" role="alert">${refusal.message}</p>`}
    <main class=${`layout ${isOfOtherText ? "stale" : ""}`}>
      <div class="controls">
        <${LambdaPanel} model=${models.left} run=${left} place=${view.left} lambdas=${view.lambdas} onChange=${setLambdas} />
        <${Strip} factors=${factors} task=${task} points=${points} lambdas=${view.lambdas} />
        <${Predictions} run=${left} right=${runs.right} models=${models} theme=${theme} />
        ${image ? html`<${ImagePanel} data=${data} view=${view} onChange=${change} />` : html`
        <${TextPanel} data=${data} source=${source} view=${view} refusal=${refusal} onChange=${change}
          onRefusal=${setRefusal} />
        <${Generation} models=${models} runs=${runs} view=${view} wanted=${wanted} source=${source} question=${question}
          onChange=${change} onRefusal=${setRefusal} />`}
      </div>
      <div class="pictures">
        <${HeadView} models=${models} runs=${runs} maps=${maps} view=${view} image=${image} theme=${theme} row=${row} hovered=${hovered}
          shared=${data.shared_vocabulary} onHover=${setHovered} onChange=${change} live=${source.live} hasAddress=${source.hasAddress} />
        <div class="grids">${grids}</div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" target="_blank" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${sides.map((side) => `${models[side].name}: ${models[side].label}, ${sizes(models[side])}`).join("; ")}.
      </p>
    </footer>
  `;
}

function sizes({ layers, heads, kv_heads: kvHeads }) {
  const grouped = kvHeads !== heads ? ` over ${kvHeads} key/value heads` : "";
  return `${layers} ${layers === 1 ? "layer" : "layers"} of ${heads} ${heads === 1 ? "head" : "heads"}${grouped}`;
}
