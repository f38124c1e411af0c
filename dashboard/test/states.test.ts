import { expect, test } from "vitest";
import type { Phase, Status } from "../src/api/types";
import { describe, orders, peerPhase, reach } from "../src/words/states";

const PHASES: Phase[] = [
  "starting", "connecting", "downloading", "training", "syncing", "paused", "draining", "leaving", "stopped", "error",
];

test("every phase has one word and a meaning of its own", () => {
  const states = PHASES.map((phase) => describe({ phase, code: phase }));
  for (const { word, meaning } of states) {
    expect(word).toMatch(/^[A-Z][a-z]+$/);
    expect(meaning).toMatch(/\.$/);
  }
  expect(new Set(states.map(({ word }) => word)).size).toBe(PHASES.length);
  expect(new Set(states.map(({ meaning }) => meaning)).size).toBe(PHASES.length);
});

test.each([
  ["training", "relay", "Relaying"], ["training", "no_text", "Waiting"], ["training", "pausing", "Pausing"],
  ["syncing", "waiting_for_peers", "Waiting"], ["stopped", "run_complete", "Complete"], ["paused", "scheduled", "Paused"],
  ["paused", "on_battery", "Paused"], ["paused", "user_active", "Paused"], ["training", "a_code_of_tomorrow", "Training"],
] as [Phase, string, string][])("%s with code %s", (phase, code, word) => {
  expect(describe({ phase, code }).word).toBe(word);
});

test("each kind of pause says why", () => {
  const meanings = ["paused", "scheduled", "on_battery", "user_active"].map((code) => describe({ phase: "paused", code }).meaning);
  expect(new Set(meanings).size).toBe(4);
});

test("what this page has never heard of still has a word", () => {
  expect(describe({ phase: "dreaming" as Phase, code: "" }).word).toBe("Dreaming");
  expect(describe(null).word).toBe("Asking");
  expect(peerPhase("")).toBe("");
  expect(reach("direct")).not.toBe(reach("none"));
});

const status = (phase: Phase, more: object = {}) => ({ phase, code: phase, node: { mode: "train" }, ...more }) as unknown as Status;

test("only orders that make sense are offered", () => {
  expect(orders(status("training"))).toEqual({ pause: true, resume: false, leave: true });
  expect(orders(status("paused"))).toEqual({ pause: false, resume: true, leave: true });
  expect(orders(status("error"))).toEqual({ pause: false, resume: true, leave: true });
  expect(orders(status("stopped"))).toEqual({ pause: false, resume: true, leave: false });
  expect(orders(status("leaving"))).toEqual({ pause: false, resume: false, leave: false });
  expect(orders(status("draining"))).toEqual({ pause: false, resume: false, leave: true });
});

test("a pause to come can be taken back, and a relay has none", () => {
  const pending = { by: "owner", until: null, after_round: 7 };
  expect(orders(status("training", { pause: pending })).resume).toBe(true);
  expect(orders(status("training", { code: "relay" })).pause).toBe(false);
  expect(orders(status("training", { node: { mode: "relay" } })).pause).toBe(false);
});
