import { readdirSync, readFileSync } from "node:fs";
import { resolve } from "node:path";
import { gzipSync } from "node:zlib";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

const OUT = resolve(import.meta.dirname, "../node/api/static");
/** Limit of all files that a browser loads, compressed. A phone loads the page over the node's uplink. */
const BYTES_MAX = 150_000;

/** Writes a .gz next to each file, for the node to serve, and fails if the build is too large. */
function compressed(): Plugin {
  return {
    name: "compressed",
    apply: "build",
    generateBundle: {
      order: "post",
      handler(_, bundle) {
        let total = 0;
        for (const file of Object.values(bundle)) {
          const source = gzipSync(file.type === "chunk" ? file.code : file.source, { level: 9 });
          total += source.length;
          this.emitFile({ type: "asset", fileName: `${file.fileName}.gz`, source });
        }
        if (total > BYTES_MAX) this.error(`The dashboard has ${total} bytes compressed; the limit is ${BYTES_MAX}.`);
        this.info(`${total} bytes compressed, of ${BYTES_MAX}.`);
      },
    },
  };
}

/** Writes the licences of the packages in the page, which must accompany it. docker/sbom.py reads the headings. */
function licences(): Plugin {
  return {
    name: "licences",
    apply: "build",
    generateBundle: {
      order: "post",
      handler() {
        const texts = new Map<string, string>();
        for (const id of this.getModuleIds()) {
          const folder = /^.*\/node_modules\/(?:@[^/]+\/)?[^/]+/.exec(id)?.[0];
          if (folder === undefined) continue;
          const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
          const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
          if (file === undefined) this.error(`${folder} has no file with its licence.`);
          const text = readFileSync(`${folder}/${file}`, "utf8").trim();
          texts.set(name, `## ${name} ${version} (${license})\n\n${text}\n`);
        }
        const source = [...texts.keys()].sort().map((name) => texts.get(name)).join("\n");
        this.emitFile({ type: "asset", fileName: "THIRD_PARTY_LICENSES.txt", source });
      },
    },
  };
}

export default defineConfig({
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    // The content security policy allows no data: URLs.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  plugins: [compressed(), licences()],
  test: { include: ["test/**/*.test.ts"], env: { TZ: "Europe/Berlin" }, isolate: false, maxWorkers: 1 },
  // Development with a running node: DILOCO_URL=http://127.0.0.1:8080 npx vite
  server: { proxy: { "/api": { target: process.env["DILOCO_URL"] ?? "http://127.0.0.1:8080" } } },
});
