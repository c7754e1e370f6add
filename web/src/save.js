// Saves what is shown as SVG, or as PNG drawn from it. Labels are vectors; a map is a small picture inside.
import { coloursOf } from "./colour.js";
import { paintMap, paintPicture } from "./draw.js";
import { curveOf } from "./row_curve.js";
import { label, nameInGroup, number, percent, place, titleOf } from "./words.js";

const INK = { light: ["#1c1e22", "#6b6f76", "#fbfaf7"], dark: ["#eceae4", "#9a9da4", "#121419"] };
const LINES = { light: ["#1766a6", "#c9620b"], dark: ["#5cace7", "#eb903c"] };
const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";

const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

function text(x, y, content, { size = 12, colour, anchor = "start", weight = 400, turn = 0 }) {
  const turned = turn ? ` transform="rotate(${turn} ${x} ${y})"` : "";
  return `<text x="${x}" y="${y}" font-size="${size}" fill="${colour}" text-anchor="${anchor}" font-weight="${weight}"${turned}>${escaped(content)}</text>`;
}

function document_(width, height, theme, parts) {
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${FONT}">`,
    `<rect width="${width}" height="${height}" fill="${INK[theme][2]}"/>`,
    ...parts,
    "</svg>",
  ].join("\n");
}

const picture = (canvas, x, y, side) =>
  `<image x="${x}" y="${y}" width="${side}" height="${side}" style="image-rendering:pixelated" href="${canvas.toDataURL("image/png")}"/>`;

export function headSvg({ models, view, panels, pieces, row, scale, lam, theme, left, net }) {
  const [ink, quiet] = INK[theme];
  const side = 300;
  const strip = 52;
  const gap = 28;
  const width = 40 + panels.length * (side + strip) + (panels.length - 1) * gap;
  const parts = [
    text(20, 34, `${models.left.name}: layer ${view.left.layer}, head ${[view.left.head, nameInGroup(models.left, view.left.head)].filter(Boolean).join(", ")}${lam == null ? "" : `, λ = ${number(lam, 2)}`}`,
      { size: 17, colour: ink, weight: 600 }),
  ];
  panels.forEach((panel, index) => {
    const x = 20 + strip + index * (side + strip + gap);
    const y = 66 + strip;
    const canvas = document.createElement("canvas");
    paintMap(canvas, panel.weights, panel.maps.length, scale, theme);
    parts.push(text(x, y - strip - 8, panel.name, { size: 14, colour: ink, weight: 600 }), picture(canvas, x, y, side));
    const cell = side / panel.maps.length;
    for (let token = 0; token < panel.maps.length; token += Math.max(1, Math.ceil(11 / cell))) {
      const name = label(pieces[panel.side][token] ?? "", 8);
      const middle = (token + 0.5) * cell + 3.5;
      parts.push(text(x - 4, y + middle, name, { size: 9.5, colour: quiet, anchor: "end" }));
      parts.push(text(x + middle, y - 4, name, { size: 9.5, colour: quiet, turn: -90 }));
    }
    parts.push(`<rect x="${x}" y="${y + Math.min(row, panel.maps.length - 1) * cell}" width="${side}" height="${Math.max(1.5, cell)}" fill="none" stroke="${ink}"/>`);
  });
  const base = 66 + strip + side + 40;
  const token = Math.min(row, left.length - 1);
  const curve = curveOf(left, net, left.second ? lam : null, token, width - 40);
  parts.push(text(20, base, `Row of token ${token + 1} “${label(pieces.left[token] ?? "", 24)}”`, { size: 13, colour: ink, weight: 600 }));
  parts.push(`<g transform="translate(20 ${base + 6})">`);
  parts.push(...curve.bars.map(([x, y, wide, high, weight]) => `<rect x="${x}" y="${weight < 0 ? curve.zero : y}" width="${wide}" height="${high}" fill="${ink}" opacity="0.32"/>`));
  parts.push(`<path d="${curve.first}" fill="none" stroke="${LINES[theme][0]}" stroke-width="1.6"/>`);
  if (curve.taken) parts.push(`<path d="${curve.taken}" fill="none" stroke="${LINES[theme][1]}" stroke-width="1.6"/>`);
  parts.push(`<line x1="44" x2="${curve.end}" y1="${curve.zero}" y2="${curve.zero}" stroke="${quiet}"/>`);
  parts.push(...curve.labelled.map((i) => text(curve.x(i), curve.y(Math.max(0, curve.left[i])) - 7, label(pieces.left[i] ?? "", 12), { size: 11, colour: ink, anchor: "middle" })));
  parts.push(text(38, curve.y(curve.high) + 4, number(curve.high, 2), { size: 10, colour: quiet, anchor: "end" }), "</g>");
  const foot = base + 200;
  parts.push(...legend(36, foot, scale, theme));
  if (left.second) {
    parts.push(text(width - 20, foot + 10, "blue line A₁, orange line λA₂, bars A₁ − λA₂", { size: 11, colour: quiet, anchor: "end" }));
  }
  return document_(width, foot + 44, theme, parts);
}

function legend(x, y, scale, theme) {
  const colours = coloursOf(theme);
  const parts = [];
  for (let index = 0; index < 64; index++) {
    const from = 3 * Math.round((510 * index) / 63);
    parts.push(`<rect x="${x + 4 * index}" y="${y}" width="4.2" height="10" fill="rgb(${colours[from]},${colours[from + 1]},${colours[from + 2]})"/>`);
  }
  [-1, 0, 1].forEach((tick) => parts.push(text(x + 128 * (1 + tick), y + 24, number(tick * scale, 2), { size: 10, colour: INK[theme][1], anchor: "middle" })));
  return parts;
}

export function gridSvg(model, heads, pictures, theme) {
  const [ink, quiet] = INK[theme];
  const side = model.heads > 8 ? 48 : 96;
  const tall = side + (model.heads > 8 ? 8 : 24);
  const parts = [text(20, 34, `${model.name}: ${model.label}, all heads`, { size: 17, colour: ink, weight: 600 })];
  for (let layer = 1; layer <= model.layers; layer++) {
    const y = 56 + (layer - 1) * tall;
    parts.push(text(34, y + side / 2 + 4, String(layer), { size: 11, colour: quiet, anchor: "end" }));
    for (let head = 1; head <= model.heads; head++) {
      const x = 44 + (head - 1) * (side + 8);
      const canvas = document.createElement("canvas");
      paintPicture(canvas, pictures((layer - 1) * model.heads + head - 1), heads.picture_size, theme);
      parts.push(picture(canvas, x, y, side));
      if (side > 60) {
        const removed = heads.removed?.[layer - 1][head - 1];
        const name = removed === undefined ? place(layer, head) : `${place(layer, head)}  −${percent(removed)}`;
        parts.push(text(x, y + side + 14, name, { size: 10.5, colour: quiet }));
      }
    }
  }
  return document_(64 + model.heads * (side + 8), 64 + model.layers * tall + 8, theme, parts);
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function save(svg, name, kind) {
  const blob = new Blob([svg], { type: "image/svg+xml" });
  if (kind === "svg") {
    download(blob, `${name}.svg`);
    return;
  }
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  canvas.toBlob((png) => download(png, `${name}.png`), "image/png");
}

export function nextSvg(model, { next, divergence, loss, learned_loss: learnedLoss }, theme) {
  const [ink, quiet] = INK[theme];
  const entries = next.slice(0, 10);
  const most = Math.max(...entries.flatMap((entry) => [entry.probability, entry.learned_probability]), 1e-9);
  const isMoved = divergence > 0;
  const [left, wide, line] = [140, 260, 24];
  const width = left + wide + (isMoved ? 140 : 80);
  const parts = [text(20, 34, `${model.name}: ${titleOf(model).toLowerCase()}`, { size: 17, colour: ink, weight: 600 })];
  entries.forEach((entry, index) => {
    const y = 56 + index * line;
    const [now, was] = [entry.probability, entry.learned_probability].map((share) => (wide * share) / most);
    parts.push(
      text(left - 8, y + 14, label(entry.piece), { colour: ink, anchor: "end" }),
      `<rect x="${left}" y="${y + 3}" width="${Math.max(1, now)}" height="${line - 8}" fill="${LINES[theme][0]}"/>`,
      text(left + wide + 58, y + 14, percent(entry.probability, 1), { colour: ink, anchor: "end" }),
    );
    if (isMoved) {
      parts.push(
        `<rect x="${left + was - 1}" y="${y}" width="2" height="${line - 2}" fill="${LINES[theme][1]}"/>`,
        text(left + wide + 120, y + 14, percent(entry.learned_probability, 1), { colour: quiet, anchor: "end" }),
      );
    }
  });
  const foot = 56 + entries.length * line + 22;
  const losses = isMoved ? `${number(loss)} (${number(learnedLoss)})` : number(loss);
  const text_ = model.grid ? "" : `loss on the text ${losses}`;
  const note = isMoved ? `KL ${number(divergence)} nats${text_ && `, ${text_}`}; orange, grey: learned λ` : text_;
  parts.push(text(20, foot, note, { size: 11, colour: quiet }));
  return document_(width, foot + 18, theme, parts);
}

export const saveHead = (details, kind) =>
  save(headSvg(details), `head-${place(details.view.left.layer, details.view.left.head)}`, kind);

export const saveNext = (model, run, theme, kind) => save(nextSvg(model, run, theme), `next-${model.name}`, kind);

export const saveGrid = (model, heads, pictures, theme, kind) =>
  save(gridSvg(model, heads, pictures, theme), `heads-${model.name}`, kind);
