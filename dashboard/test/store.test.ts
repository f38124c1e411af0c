import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Status } from "../src/api/schema";

/** Sends an event on the newest stream. */
let tell: (status: Status) => void;
let answer: Status;
let page: EventTarget & { hidden: boolean };

const since = (started_at: string) =>
  ({ phase: "training", code: "", node: { name: "ada", mode: "train", started_at } }) as unknown as Status;

async function look(hidden: boolean): Promise<void> {
  page.hidden = hidden;
  page.dispatchEvent(new Event("visibilitychange"));
  await vi.advanceTimersByTimeAsync(0);
}

beforeEach(() => {
  vi.useFakeTimers();
  vi.resetModules();
  page = Object.assign(new EventTarget(), { hidden: false, title: "", documentElement: { dataset: {} } });
  vi.stubGlobal("document", page);
  vi.stubGlobal("fetch", async () => ({ ok: true, json: async () => answer }));
  vi.stubGlobal(
    "EventSource",
    class {
      addEventListener(name: string, hear: (event: { data: string }) => void): void {
        if (name === "status") tell = (status) => hear({ data: JSON.stringify(status) });
      }
      close(): void {}
    },
  );
});
afterEach(async () => {
  await look(true);
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

test("a restart is detected also while the tab was hidden", async () => {
  const { link, reconnects, start } = await import("../src/state/store");
  answer = since("09:00");
  start();
  await vi.advanceTimersByTimeAsync(0);
  await look(true);
  await look(false);
  tell(answer);
  expect([link.value, reconnects.value]).toEqual(["stream", 0]);

  await look(true);
  answer = since("09:05");
  await look(false);
  expect(reconnects.value).toBe(1);
  tell(answer);
  expect(reconnects.value).toBe(1);
  tell(since("09:10"));
  expect(reconnects.value).toBe(2);
});
