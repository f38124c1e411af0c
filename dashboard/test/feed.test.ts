import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Status } from "../src/api/schema";
import { Feed, type Link, LOST_POLL_MS, POLL_MS, RETRY_MS, SILENCE_MS } from "../src/state/feed";

/** A fake node: its current answer, and the streams that the feed opened. */
class Node {
  answer: "ok" | "down" | "locked" = "ok";
  asked = 0;
  streams: { onStatus(status: Status): void; onFailure(): void; open: boolean }[] = [];
  links: Link[] = [];
  news: string[] = [];
  receivedAt: number | null = null;
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
    (link, receivedAt) => {
      this.links.push(link);
      this.receivedAt = receivedAt;
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

test("polls once, then uses one stream while it sends events", async () => {
  await streaming();
  expect(node.news).toEqual(["asked", "streamed"]);
  for (let second = 0; second < 60; second += 1) {
    await pass(1000);
    node.stream?.onStatus(say("streamed"));
  }
  expect([node.asked, node.streams.length, node.link]).toEqual([1, 1, "stream"]);
});

test("a silent stream causes a poll, and stays open if the node answers", async () => {
  await streaming();
  await pass(SILENCE_MS);
  expect([node.asked, node.link, node.open]).toEqual([2, "stream", 1]);
  expect(node.receivedAt).toBe(Date.now());
});

test("a proxy that holds the events of the stream back is polling", async () => {
  node.feed.wake();
  await pass(0);
  expect([node.link, node.open]).toEqual(["opening", 1]);
  await pass(POLL_MS);
  expect([node.asked, node.link, node.open]).toEqual([2, "polling", 1]);
  node.stream?.onStatus(say("streamed"));
  expect(node.link).toBe("stream");
});

test("a node that hangs behind an open stream counts as lost", async () => {
  await streaming();
  const heard = Date.now();
  node.answer = "down";
  await pass(SILENCE_MS);
  expect([node.link, node.open, node.receivedAt]).toEqual(["lost", 0, heard]);
});

test("without a stream it polls every five seconds and retries the stream with growing delays", async () => {
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

test("a lost node is polled every two seconds; after its return there is one new stream", async () => {
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

test("a hidden tab closes the stream and does not poll; a visible one resumes at once", async () => {
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

test("a locked node is not polled until the login", async () => {
  node.answer = "locked";
  node.feed.wake();
  await pass(60_000);
  expect([node.link, node.asked, node.open]).toEqual(["locked", 1, 0]);
  node.answer = "ok";
  node.feed.wake();
  await pass(0);
  expect(node.open).toBe(1);
});

test("late answers and events after sleep are ignored", async () => {
  await streaming();
  const old = node.stream;
  node.feed.sleep();
  const { length } = node.news;
  old?.onStatus(say("late"));
  old?.onFailure();
  await pass(RETRY_MS);
  expect([node.news.length, node.link]).toEqual([length, "asleep"]);
});
