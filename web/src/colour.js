// The diverging scale: blue for positive weights, orange for negative ones, the page's own background at 0. Blue and
// orange differ for every kind of colour blindness, and the lightness alone tells the size.

const STOPS = {
  light: {
    positive: [[250, 249, 246], [196, 221, 240], [104, 168, 214], [23, 102, 166], [5, 48, 97]],
    negative: [[250, 249, 246], [253, 219, 179], [244, 164, 86], [201, 98, 11], [115, 46, 4]],
  },
  dark: {
    positive: [[22, 24, 29], [20, 58, 92], [32, 106, 164], [92, 172, 231], [205, 233, 255]],
    negative: [[22, 24, 29], [84, 45, 12], [156, 84, 17], [235, 144, 60], [255, 225, 189]],
  },
};

function table(theme) {
  const colours = new Uint8ClampedArray(511 * 3);
  for (let index = 0; index < 511; index++) {
    const stops = STOPS[theme][index < 255 ? "negative" : "positive"];
    const place = (Math.abs(index - 255) / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      const [from, to] = [stops[low][channel], stops[low + 1][channel]];
      colours[3 * index + channel] = from + (to - from) * (place - low);
    }
  }
  return colours;
}

const TABLES = { light: table("light"), dark: table("dark") };

// The theme of the notebook, if the page is a widget of one that says it (Jupyter, marimo), else the reader's own.
export function themeNow() {
  const { jpThemeLight } = document.body.dataset;
  if (jpThemeLight !== undefined) return jpThemeLight === "true" ? "light" : "dark";
  for (const theme of ["light", "dark"]) {
    if (document.body.classList.contains(`${theme}-theme`)) return theme;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// Most weights are small, so that the scale goes by the square root: −1 … 1 → 0 … 510.
export const indexOf = (weight, scale) =>
  255 + Math.round(255 * Math.sign(weight) * Math.sqrt(Math.min(1, Math.abs(weight) / scale)));

export const coloursOf = (theme) => TABLES[theme];

export function cssColour(weight, scale, theme) {
  const index = 3 * indexOf(weight, scale);
  const [r, g, b] = TABLES[theme].subarray(index, index + 3);
  return `rgb(${r} ${g} ${b})`;
}

// Black or white, whichever is read more easily on the colour of a weight.
export function inkOn(weight, scale, theme) {
  const index = 3 * indexOf(weight, scale);
  const [r, g, b] = TABLES[theme].subarray(index, index + 3);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14161a" : "#ffffff";
}
