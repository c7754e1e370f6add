// Bundles the page into the Python package. The first line of each file names the sources by their hash, so that a test
// without Node can tell whether the committed bundle is theirs (tests/explorer/test_bundle.py).
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const names = ["build.mjs", "package-lock.json", "package.json"];
names.push(...readdirSync(join(here, "src")).map((name) => `src/${name}`));

const hash = createHash("sha256");
for (const name of names.sort()) {
  const content = readFileSync(join(here, name));
  hash.update(`${name}\0${content.length}\0`).update(content);
}
const banner = `/* sources ${hash.digest("hex")} */`;

await build({
  entryPoints: { explorer: join(here, "src/main.js") },
  outdir: join(here, "../src/diff_transformer/explorer/bundle"),
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "inline",
  banner: { js: banner, css: banner },
  logLevel: "warning",
});
