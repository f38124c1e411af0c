/** Delivers the newest status: from an event stream, by polling if that fails, and not at all while the tab is hidden.
 *
 * The stream, the request and the clock are arguments.
 */

import type { Status } from "../api/schema";

/** `asleep`: the tab is hidden. `lost`: the node does not answer. `locked`: the node requires its token. */
export type Link = "opening" | "stream" | "polling" | "lost" | "locked" | "asleep";

export interface Stream {
  close(): void;
}

export interface FeedOptions {
  openStream(onStatus: (status: Status) => void, onFailure: () => void): Stream;
  ask(): Promise<Status>;
  isLocked(error: unknown): boolean;
  now(): number;
  later(run: () => void, ms: number): unknown;
  cancel(timer: unknown): void;
}

export const POLL_MS = 5_000;
export const LOST_POLL_MS = 2_000;
/** A stream sends nothing while nothing changes. After this time without an event the page polls the node. */
export const SILENCE_MS = 8_000;
/** A failed stream is opened again after this time, doubled after each failure up to RETRY_MAX_MS. */
export const RETRY_MS = 4_000;
export const RETRY_MAX_MS = 60_000;

export class Feed {
  private link: Link = "asleep";
  private receivedAt: number | null = null;
  private stream: Stream | null = null;
  private timer: unknown = null;
  private isPolling = false;
  private failures = 0;
  private nextStreamAt = 0;
  /** Increases with every sleep, so that a late answer is ignored. */
  private generation = 0;

  constructor(
    private readonly options: FeedOptions,
    private readonly onStatus: (status: Status) => void,
    private readonly onLink: (link: Link, receivedAt: number | null) => void,
  ) {}

  /** Starts, or resumes after `sleep` or a login. */
  wake(): void {
    if (this.link !== "asleep" && this.link !== "locked") return;
    this.failures = 0;
    this.nextStreamAt = 0;
    this.setLink("opening");
    void this.poll();
  }

  /** Closes everything while the tab is hidden. */
  sleep(): void {
    this.stop();
    this.setLink("asleep");
  }

  private stop(): void {
    this.generation += 1;
    this.isPolling = false;
    this.closeStream();
    this.options.cancel(this.timer);
    this.timer = null;
  }

  private setLink(link: Link): void {
    this.link = link;
    this.onLink(link, this.receivedAt);
  }

  private receive(status: Status, link: Link): void {
    this.receivedAt = this.options.now();
    this.onStatus(status);
    this.setLink(link);
  }

  private schedule(ms: number): void {
    this.options.cancel(this.timer);
    this.timer = this.options.later(() => this.tick(), ms);
  }

  private tick(): void {
    const silentMs = this.options.now() - (this.receivedAt ?? 0);
    if (this.stream && this.link === "stream" && silentMs < SILENCE_MS) this.schedule(SILENCE_MS - silentMs);
    else void this.poll();
  }

  /** Polls the status once, and schedules the next step by its result. */
  private async poll(): Promise<void> {
    if (this.isPolling) return;
    this.isPolling = true;
    const generation = this.generation;
    try {
      const status = await this.options.ask();
      if (generation !== this.generation) return;
      this.isPolling = false;
      // A proxy may hold the events of an open stream back.
      const isFirst = !this.stream && !this.failures;
      this.receive(status, this.stream && this.link === "stream" ? "stream" : isFirst ? "opening" : "polling");
      this.tryStream();
      this.schedule(POLL_MS);
    } catch (error) {
      if (generation !== this.generation) return;
      this.isPolling = false;
      if (this.options.isLocked(error)) {
        this.stop();
        this.setLink("locked");
        return;
      }
      // A node that does not answer sends no events either, even if the connection looks open.
      this.closeStream();
      this.nextStreamAt = 0;
      this.setLink("lost");
      this.schedule(LOST_POLL_MS);
    }
  }

  private tryStream(): void {
    if (this.stream || this.options.now() < this.nextStreamAt) return;
    const stream = this.options.openStream(
      (status) => {
        if (this.stream !== stream) return;
        this.failures = 0;
        this.receive(status, "stream");
        this.schedule(SILENCE_MS);
      },
      () => {
        if (this.stream !== stream) return;
        this.closeStream();
        this.nextStreamAt = this.options.now() + Math.min(RETRY_MAX_MS, RETRY_MS * 2 ** this.failures);
        this.failures += 1;
        void this.poll();
      },
    );
    this.stream = stream;
  }

  private closeStream(): void {
    this.stream?.close();
    this.stream = null;
  }
}
