import { signal } from "@preact/signals";
import { expect, test, vi } from "vitest";
import { drafts, parseDrafts, setDrafts, watchDrafts } from "../src/state/drafts";

test("stored drafts that are damaged count as none", () => {
  expect(parseDrafts('{"node.name": "x"}')).toEqual({ "node.name": "x" });
  for (const text of [null, "", "{", "[1]", "null", "3"]) expect(parseDrafts(text)).toEqual({});
});

test("each node has its own drafts", () => {
  const kept = new Map<string, string>([["diloco-drafts-ada", '{"limits.disk_gb": 9}']]);
  vi.stubGlobal("localStorage", {
    getItem: (key: string) => kept.get(key) ?? null,
    setItem: (key: string, value: string) => kept.set(key, value),
    removeItem: (key: string) => kept.delete(key),
  });
  vi.stubGlobal("addEventListener", () => undefined);
  const peer = signal("");
  watchDrafts(peer);
  setDrafts({ "node.name": "typed before the peer id was known" });
  peer.value = "ada";
  expect([...kept.keys()]).toEqual(["diloco-drafts-ada"]);
  const ofAda = { "limits.disk_gb": 9, "node.name": "typed before the peer id was known" };
  expect(drafts.value).toEqual(ofAda);
  peer.value = "bob";
  expect(drafts.value).toEqual({});
  setDrafts({ "node.name": "bob" });
  peer.value = ""; // The node restarts.
  expect(drafts.value).toEqual({ "node.name": "bob" });
  peer.value = "ada";
  expect(drafts.value).toEqual(ofAda);
});
