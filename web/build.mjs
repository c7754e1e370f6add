// Bundles the page into the Python package. The first line of each file names the sources by their hash, so that a test
// without Node can tell whether the committed bundle is theirs (tests/explorer/test_bundle.py).
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
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

const bundle = join(here, "../src/diff_transformer/explorer/bundle");
await build({
  entryPoints: { explorer: join(here, "src/main.js") },
  outdir: bundle,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "inline",
  banner: { js: `${banner}\n/* with preact (MIT) and htm (Apache-2.0), whose licences stand in bundle/LICENSES.txt */`, css: banner },
  logLevel: "warning",
});

// The licences of what is bundled ask to go along with it.
const licences = ["preact", "htm"].map((name) => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8")}`);
writeFileSync(join(bundle, "LICENSES.txt"), licences.join("\n\n"));
