import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Status } from "../src/api/types";
import { Feed, type Link, LOST_POLL_MS, POLL_MS, RETRY_MS, SILENCE_MS } from "../src/live/feed";

/** A node behind the feed: what it answers now, and the streams that were opened to it. */
class Node {
  answer: "ok" | "down" | "locked" = "ok";
  asked = 0;
  streams: { onStatus(status: Status): void; onFailure(): void; open: boolean }[] = [];
  links: Link[] = [];
  news: string[] = [];
  heardAt: number | null = null;
  readonly feed = new Feed(
    {
      openStream: (onStatus, onFailure) => {
        const stream = { onStatus, onFailure, open: true };
        this.streams.push(stream);
        return { close: () => void (stream.open = false) };
      },
      ask: async () => {
        this.asked += 1;
        if (this.answer !== "ok") throw new Error(this.answer);
        return say("asked");
      },
      isLocked: (error) => (error as Error).message === "locked",
      now: Date.now,
      later: (run, ms) => setTimeout(run, ms),
      cancel: (timer) => clearTimeout(timer as NodeJS.Timeout),
    },
    (status) => this.news.push(status.reason),
    (link, heardAt) => {
      this.links.push(link);
      this.heardAt = heardAt;
    },
  );

  get link(): Link | undefined {
    return this.links.at(-1);
  }

  get stream() {
    return this.streams.at(-1);
  }

  get open(): number {
    return this.streams.filter((stream) => stream.open).length;
  }
}

const say = (reason: string) => ({ reason }) as Status;
const pass = (ms: number) => vi.advanceTimersByTimeAsync(ms);
let node: Node;

beforeEach(() => {
  vi.useFakeTimers();
  node = new Node();
});
afterEach(() => vi.useRealTimers());

async function streaming(): Promise<void> {
  node.feed.wake();
  await pass(0);
  node.stream?.onStatus(say("streamed"));
}

test("a full answer first, then one stream and no more questions while it speaks", async () => {
  await streaming();
  expect(node.news).toEqual(["asked", "streamed"]);
  for (let second = 0; second < 60; second += 1) {
    await pass(1000);
    node.stream?.onStatus(say("streamed"));
  }
  expect([node.asked, node.streams.length, node.link]).toEqual([1, 1, "stream"]);
});

test("a silent stream is not trusted: the node is asked, and stays live when it answers", async () => {
  await streaming();
  await pass(SILENCE_MS);
  expect([node.asked, node.link, node.open]).toEqual([2, "stream", 1]);
  expect(node.heardAt).toBe(Date.now());
});

test("a node that hangs behind an open stream is found out", async () => {
  await streaming();
  const heard = Date.now();
  node.answer = "down";
  await pass(SILENCE_MS);
  expect([node.link, node.open, node.heardAt]).toEqual(["lost", 0, heard]);
});

test("without a stream it polls every five seconds, and tries the stream again, ever more rarely", async () => {
  await streaming();
  node.stream?.onFailure();
  await pass(0);
  expect([node.link, node.open]).toEqual(["polling", 0]);
  const before = node.asked;
  await pass(POLL_MS);
  expect(node.asked).toBe(before + 1);
  expect(node.streams).toHaveLength(2);
  for (let minute = 0; minute < 30; minute += 1) {
    if (node.stream?.open) node.stream.onFailure();
    await pass(60_000);
  }
  expect(node.streams.length).toBeLessThan(40);
  expect(node.asked).toBeGreaterThan(before + 300);
});

test("a node that is gone is asked every two seconds, and its return is one full answer and a new stream", async () => {
  await streaming();
  node.answer = "down";
  node.stream?.onFailure();
  await pass(0);
  expect(node.link).toBe("lost");
  await pass(10 * LOST_POLL_MS);
  expect(node.streams).toHaveLength(1);
  node.answer = "ok";
  await pass(LOST_POLL_MS);
  expect(node.open).toBe(1);
  node.stream?.onStatus(say("back"));
  expect([node.link, node.news.at(-1)]).toEqual(["stream", "back"]);
});

test("hidden: nothing is open and nothing is asked; looked at again: at once", async () => {
  await streaming();
  node.feed.sleep();
  expect([node.open, node.link]).toEqual([0, "asleep"]);
  const { asked } = node;
  await pass(3_600_000);
  expect(node.asked).toBe(asked);
  node.feed.wake();
  await pass(0);
  expect([node.asked, node.open]).toEqual([asked + 1, 1]);
});

test("locked: it waits for the token, and goes on after it", async () => {
  node.answer = "locked";
  node.feed.wake();
  await pass(60_000);
  expect([node.link, node.asked, node.open]).toEqual(["locked", 1, 0]);
  node.answer = "ok";
  node.feed.wake();
  await pass(0);
  expect(node.open).toBe(1);
});

test("what an old stream or an old question says after sleep changes nothing", async () => {
  await streaming();
  const old = node.stream;
  node.feed.sleep();
  const { length } = node.news;
  old?.onStatus(say("late"));
  old?.onFailure();
  await pass(RETRY_MS);
  expect([node.news.length, node.link]).toEqual([length, "asleep"]);
});
