// Copies what the documentation's pages load, KaTeX and two typefaces, from node_modules into assets/, with their licences.
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";

const from = new URL("./node_modules/", import.meta.url);
const to = new URL("./assets/", import.meta.url);
// Latin and Greek: the pages are in English, with λ.
const typefaces = {
  "@fontsource-variable/inter": [
    "inter-latin-wght-normal",
    "inter-latin-wght-italic",
    "inter-greek-wght-normal",
    "inter-greek-wght-italic",
  ],
  "@fontsource-variable/jetbrains-mono": ["jetbrains-mono-latin-wght-normal", "jetbrains-mono-greek-wght-normal"],
};

function copy(source, target) {
  cpSync(new URL(source, from), new URL(target, to));
}

for (const folder of ["katex", "fonts"]) {
  rmSync(new URL(folder, to), { recursive: true, force: true });
  mkdirSync(new URL(`${folder}/`, to), { recursive: true });
}
copy("katex/dist/katex.min.js", "katex/katex.min.js");
copy("katex/LICENSE", "katex/LICENSE");
// Every browser of today reads woff2, so the fonts are there in that format alone.
const style = readFileSync(new URL("katex/dist/katex.min.css", from), "utf8");
const otherFormats = /,url\([^)]*\.(?:woff|ttf)\) format\("(?:woff|truetype)"\)/g;
writeFileSync(new URL("katex/katex.min.css", to), style.replace(otherFormats, ""));
for (const file of readdirSync(new URL("katex/dist/fonts/", from)).filter((name) => name.endsWith(".woff2"))) {
  copy(`katex/dist/fonts/${file}`, `katex/fonts/${file}`);
}
for (const [folder, files] of Object.entries(typefaces)) {
  for (const file of files) copy(`${folder}/files/${file}.woff2`, `fonts/${file}.woff2`);
  copy(`${folder}/LICENSE`, `fonts/${folder.split("/").pop()}-LICENSE.txt`);
}
