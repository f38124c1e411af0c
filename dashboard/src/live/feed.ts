/** Keeps the newest status coming: by one event stream, by polling when that fails, not at all while nobody looks.
 *
 * Knows when to ask and how old the news is; the stream, the request and the clock are arguments.
 */

import type { Status } from "../api/types";

/** `asleep`: the tab is hidden. `lost`: the node did not answer just now. `locked`: it wants its token. */
export type Link = "opening" | "stream" | "polling" | "lost" | "locked" | "asleep";

export interface Stream {
  close(): void;
}

export interface Means {
  openStream(onStatus: (status: Status) => void, onFailure: () => void): Stream;
  ask(): Promise<Status>;
  isLocked(error: unknown): boolean;
  now(): number;
  later(run: () => void, ms: number): unknown;
  cancel(timer: unknown): void;
}

export const POLL_MS = 5_000;
export const LOST_POLL_MS = 2_000;
/** A stream says nothing while nothing changes; after so long the node is asked whether it is still there. */
export const SILENCE_MS = 8_000;
/** A stream that failed is tried again after so long, twice that, and so on up to the longest. */
export const RETRY_MS = 4_000;
export const RETRY_MAX_MS = 60_000;

export class Feed {
  private link: Link = "asleep";
  private heardAt: number | null = null;
  private stream: Stream | null = null;
  private timer: unknown = null;
  private asking = false;
  private failures = 0;
  private streamDueAt = 0;
  /** Grows with every sleep, so that an answer to an earlier question changes nothing. */
  private era = 0;

  constructor(
    private readonly means: Means,
    private readonly onStatus: (status: Status) => void,
    private readonly onLink: (link: Link, heardAt: number | null) => void,
  ) {}

  /** Begin, or go on after `sleep` or a login. */
  wake(): void {
    if (this.link !== "asleep" && this.link !== "locked") return;
    this.failures = 0;
    this.streamDueAt = 0;
    this.turn("opening");
    void this.question();
  }

  /** Close everything: the tab is hidden. */
  sleep(): void {
    this.halt();
    this.turn("asleep");
  }

  private halt(): void {
    this.era += 1;
    this.asking = false;
    this.closeStream();
    this.means.cancel(this.timer);
    this.timer = null;
  }

  private turn(link: Link): void {
    this.link = link;
    this.onLink(link, this.heardAt);
  }

  private heard(status: Status, link: Link): void {
    this.heardAt = this.means.now();
    this.onStatus(status);
    this.turn(link);
  }

  private schedule(ms: number): void {
    this.means.cancel(this.timer);
    this.timer = this.means.later(() => this.tick(), ms);
  }

  private tick(): void {
    const silentMs = this.means.now() - (this.heardAt ?? 0);
    if (this.stream && this.link === "stream" && silentMs < SILENCE_MS) this.schedule(SILENCE_MS - silentMs);
    else void this.question();
  }

  /** Ask for the status once; what comes of it decides what is next. */
  private async question(): Promise<void> {
    if (this.asking) return;
    this.asking = true;
    const era = this.era;
    try {
      const status = await this.means.ask();
      if (era !== this.era) return;
      this.asking = false;
      this.heard(status, this.stream ? this.link : this.failures ? "polling" : "opening");
      this.tryStream();
      this.schedule(POLL_MS);
    } catch (error) {
      if (era !== this.era) return;
      this.asking = false;
      if (this.means.isLocked(error)) {
        this.halt();
        this.turn("locked");
        return;
      }
      // The node does not answer, so its stream is as good as gone, whatever the connection looks like.
      this.closeStream();
      this.streamDueAt = 0;
      this.turn("lost");
      this.schedule(LOST_POLL_MS);
    }
  }

  private tryStream(): void {
    if (this.stream || this.means.now() < this.streamDueAt) return;
    const stream = this.means.openStream(
      (status) => {
        if (this.stream !== stream) return;
        this.failures = 0;
        this.heard(status, "stream");
        this.schedule(SILENCE_MS);
      },
      () => {
        if (this.stream !== stream) return;
        this.closeStream();
        this.streamDueAt = this.means.now() + Math.min(RETRY_MAX_MS, RETRY_MS * 2 ** this.failures);
        this.failures += 1;
        void this.question();
      },
    );
    this.stream = stream;
  }

  private closeStream(): void {
    this.stream?.close();
    this.stream = null;
  }
}
