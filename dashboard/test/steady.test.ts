import { expect, test } from "vitest";
import type { Phase, Status } from "../src/api/schema";
import { Steady, STEADY_MS } from "../src/state/steady";

const status = (phase: Phase, since: string, code: string = phase) =>
  ({ phase, code, since, reason: `${phase} since ${since}` }) as unknown as Status;

test("a short sync in each round does not interrupt training", () => {
  const steady = new Steady();
  const words: string[] = [];
  for (let round = 0; round < 3; round += 1) {
    const at = round * 10_000;
    words.push(steady.next(status("training", `t${round}`), at).phase);
    words.push(steady.next(status("syncing", `s${round}`), at + 8_000).phase);
    words.push(steady.next(status("syncing", `s${round}`), at + 8_000 + STEADY_MS - 1).phase);
  }
  expect(new Set(words)).toEqual(new Set(["training"]));
  const shown = steady.next(status("training", "t3"), 30_000);
  expect(shown.reason).toBe("training since t3");
});

test("a long sync is shown, and training after it begins anew", () => {
  const steady = new Steady();
  steady.next(status("training", "t0"), 0);
  expect(steady.next(status("syncing", "s0"), 1_000).phase).toBe("training");
  expect(steady.next(status("syncing", "s0"), 1_000 + STEADY_MS).since).toBe("s0");
  expect(steady.next(status("training", "t1"), 9_000).since).toBe("t1");
});

test("waiting for members, a pause and an error are shown at once", () => {
  for (const news of [status("syncing", "x", "waiting_for_peers"), status("paused", "x"), status("error", "x")]) {
    const steady = new Steady();
    steady.next(status("training", "t0"), 0);
    expect(steady.next(news, 1)).toBe(news);
  }
});
