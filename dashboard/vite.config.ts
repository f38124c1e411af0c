import { resolve } from "node:path";
import { gzipSync } from "node:zlib";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

const OUT = resolve(import.meta.dirname, "../node/api/static");
/** All that a browser loads, compressed. A page that a volunteer's phone opens over the node's own uplink stays small. */
const BYTES_MAX = 150_000;

/** Puts a .gz beside each file, which the node serves as it is; a build that grew too large is refused. */
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
        if (total > BYTES_MAX) this.error(`The dashboard has ${total} bytes compressed, over ${BYTES_MAX}.`);
        this.info(`${total} bytes compressed, of ${BYTES_MAX}.`);
      },
    },
  };
}

export default defineConfig({
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    // Nothing inlined: the page's policy allows no data: addresses.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  plugins: [compressed()],
  test: { include: ["test/**/*.test.ts"], env: { TZ: "Europe/Berlin" }, isolate: false, maxWorkers: 1 },
  // `npx vite` beside a running node: DILOCO_URL=http://127.0.0.1:8080 npx vite
  server: { proxy: { "/api": { target: process.env["DILOCO_URL"] ?? "http://127.0.0.1:8080" } } },
});
