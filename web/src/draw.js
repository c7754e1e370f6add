// Draws maps on canvases.
import { coloursOf, indexOf } from "./colour.js";
import { rowOf } from "./decode.js";

// A map of N rows → side × side. A pixel is the weight of largest size within it, so that one bright token is
// not lost where a pixel has many.
export function pooledExtremes(weights, length, side) {
  const extremes = new Float32Array(side * side);
  for (let row = 0; row < length; row++) {
    const line = side * Math.floor((row * side) / length);
    rowOf(weights, length, row).forEach((weight, column) => {
      const pixel = line + Math.floor((column * side) / length);
      if (Math.abs(weight) > Math.abs(extremes[pixel])) extremes[pixel] = weight;
    });
  }
  return extremes;
}

// Puts side × side indices of colours on a canvas, which the page scales without smoothing.
export function paint(canvas, indices, side, theme) {
  if (canvas.width !== side || canvas.height !== side) canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  const colours = coloursOf(theme);
  for (let pixel = 0; pixel < indices.length; pixel++) {
    const colour = 3 * indices[pixel];
    image.data[4 * pixel] = colours[colour];
    image.data[4 * pixel + 1] = colours[colour + 1];
    image.data[4 * pixel + 2] = colours[colour + 2];
    image.data[4 * pixel + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

export function paintMap(canvas, weights, length, scale, theme, most = 640) {
  const side = Math.min(length, most);
  const extremes = pooledExtremes(weights, length, side);
  paint(canvas, Uint16Array.from(extremes, (weight) => indexOf(weight, scale)), side, theme);
}

// The pictures of all heads on one canvas behind the grid, each where its element is: a canvas for each of hundreds of
// heads takes the browser seconds to show. `elements` come layer by layer.
export function paintPictures(canvas, elements, pictureOf, side, theme) {
  const frame = canvas.parentElement.getBoundingClientRect();
  const ratio = devicePixelRatio;
  [canvas.width, canvas.height] = [Math.ceil(frame.width * ratio), Math.ceil(frame.height * ratio)];
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  const one = document.createElement("canvas");
  elements.forEach((element, index) => {
    const box = element.getBoundingClientRect();
    paintPicture(one, pictureOf(index), side, theme);
    const place = [box.left - frame.left, box.top - frame.top, box.width, box.height];
    context.drawImage(one, ...place.map((length) => Math.round(length * ratio)));
  });
}

// The small pictures come from the server as ±127 · √(weight / scale).
export function paintPicture(canvas, picture, side, theme) {
  paint(canvas, Uint16Array.from(picture, (value) => 255 + Math.round((255 * value) / 127)), side, theme);
}
