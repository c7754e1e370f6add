// Sliders for the factor of all λ, and for the λ of one layer and of one head.
import { html } from "htm/preact";
import { useIds } from "./ids.js";
import { AS_LEARNED, changed, ownLambda } from "./view_state.js";
import { number } from "./words.js";

const LOWEST = -0.5;
const HIGHEST = 1.5;
export const FACTORS = [-0.5, 2];

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function Slider({ id, name, value, learned, isSet, inherited, main, onInput, onLearned }) {
  const [low, high] = main ? FACTORS : [Math.min(LOWEST, Math.floor(10 * learned) / 10), Math.max(HIGHEST, Math.ceil(10 * learned) / 10)];
  const sign = main ? "×" : "=";
  const part = (x) => (x - low) / (high - low);
  const shown = Math.max(low, Math.min(high, value));
  return html`
    <div class=${`slider ${main ? "main" : ""} ${isSet ? "set" : ""}`}>
      <div class="slider-head">
        <label for=${id}>${name}</label>
        <output for=${id}>λ ${sign} ${number(value, 2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${part(0)};--learned-part:${part(learned)}`}>
        <input id=${id} type="range" min=${low} max=${high} step="0.01" value=${shown}
          aria-valuetext=${`λ ${sign} ${number(value, 2)}; learned ${number(learned, 2)}`}
          onInput=${(event) => onInput(Number(event.target.value))} />
        <span class="mark zero" aria-hidden="true"></span>
        <span class="mark learned" aria-hidden="true"></span>
      </div>
      <div class="slider-foot">
        <span class="quiet">${isSet && main ? "of the learned λ of every head" : isSet ? `learned ${number(learned, 2)}` : inherited ? "as set above" : "as learned"}</span>
        <span class="buttons">
          <button type="button" disabled=${!isSet} onClick=${onLearned}
            aria-label=${`${name}: back to ${inherited ? "what is set above" : "the learned λ"}`}>
            ${inherited ? "As above" : "Learned"}
          </button>
          <button type="button" onClick=${() => onInput(0)} aria-label=${`${name}: set λ to 0`}>0</button>
        </span>
      </div>
    </div>`;
}

const without = (object, key) => Object.fromEntries(Object.entries(object).filter(([name]) => name !== String(key)));

export function LambdaPanel({ model, run, place, lambdas, onChange }) {
  const id = useIds();
  if (!run?.learned_lambdas) return html`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;
  const learned = run.learned_lambdas;
  const { layer, head } = place;
  const headName = `${layer}.${head}`;
  const { factor, layers, heads } = lambdas;
  const learnedOfLayer = mean(learned[layer - 1]);
  const own = [...Object.values(layers), ...Object.values(heads)];
  const isNegative = [...own, ...learned.flat().map((value) => factor * value)].some((value) => value < 0);
  return html`
    <section class="card lambda" aria-labelledby=${id("lambda-title")}>
      <div class="card-head">
        <h2 id=${id("lambda-title")}>Move λ</h2>
        <button type="button" class="link" disabled=${!changed(lambdas)}
          onClick=${() => onChange(AS_LEARNED)}>All as learned</button>
      </div>
      <${Slider} id=${id("lambda-factor")} main name="All heads" value=${factor} learned=${1} isSet=${factor !== 1}
        onInput=${(value) => onChange({ factor: value, layers: {}, heads: {} })}
        onLearned=${() => onChange({ ...lambdas, factor: 1 })} />
    </section>
    <div class="finer">
      <details open=${own.length > 0 || undefined}>
        <summary>One layer, one head</summary>
        <${Slider} id=${id("lambda-layer")} name=${`Layer ${layer}`} value=${layers[layer] ?? factor * learnedOfLayer}
          learned=${learnedOfLayer} isSet=${layer in layers} inherited=${factor !== 1}
          onInput=${(value) => onChange({ ...lambdas, layers: { ...layers, [layer]: value } })}
          onLearned=${() => onChange({ ...lambdas, layers: without(layers, layer) })} />
        <${Slider} id=${id("lambda-head")} name=${`Head ${headName}`} value=${ownLambda(lambdas, place) ?? factor * learned[layer - 1][head - 1]}
          learned=${learned[layer - 1][head - 1]} isSet=${headName in heads} inherited=${factor !== 1 || layer in layers}
          onInput=${(value) => onChange({ ...lambdas, heads: { ...heads, [headName]: value } })}
          onLearned=${() => onChange({ ...lambdas, heads: without(heads, headName) })} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${isNegative ? " A λ below 0 adds the second map instead of taking it away." : ""}
        ${model.lambda_per_token ? " The model computes a λ for every token; the slider of a layer or of a head gives all of them the same." : ""}
        ${run.recorded_at !== undefined ? ` What the model predicts was recorded at λ ${factor === 1 ? "=" : "×"} ${number(run.recorded_at, 2)}.` : ""}
      </p>
    </div>`;
}
