// Keeps columns readable: a cell is as wide as its text, up to eighteen characters, and a table that is wider scrolls.
for (const cell of document.querySelectorAll(".md-typeset table:not([class]) td")) {
  cell.style.minWidth = `${Math.min(cell.textContent.trim().length + 1, 18)}ch`;
}
