/** The log view. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Component, type ComponentType, type FunctionComponent, h } from "preact";
import { api, type Level, LEVELS, errorText } from "../api/client";
import type { LogLine } from "../api/schema";
import { clockWithSeconds, dayAndClock, moment } from "../format/format";
import { clean } from "../format/sanitize";
import { appendLines } from "../state/records";
import { reconnects, usePolling } from "../state/store";

const POLL_MS = 2_000;
const FIRST = 300;
const MORE = 1_000;

export function Logs() {
  const level = useSignal<Level>("info");
  const search = useSignal("");
  const follow = useSignal(true);
  const lines = useSignal<LogLine[]>([]);
  const fault = useSignal("");
  const isLoaded = useSignal(false);
  /** The last id received. A new object for each filter, so that late answers are ignored. */
  const last = useRef<{ id: number | null }>({ id: null });
  const box = useRef<HTMLDivElement>(null);

  useEffect(() => {
    lines.value = [];
    isLoaded.value = false;
    last.current = { id: null };
  }, [level.value, search.value, reconnects.value]);

  usePolling(
    async () => {
      try {
        const asked = last.current;
        const after = asked.id;
        const limit = after === null ? FIRST : MORE;
        const { records, last_id } = await api.logs(level.value, search.value, limit, after ?? undefined);
        if (asked !== last.current) return 0;
        asked.id = last_id;
        fault.value = "";
        isLoaded.value = true;
        if (records.length) lines.value = appendLines(after === null ? [] : lines.peek(), records);
      } catch (error) {
        fault.value = errorText(error);
      }
      return POLL_MS;
    },
    POLL_MS,
    [level.value, search.value, reconnects.value],
  );

  useEffect(() => {
    if (follow.value && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.value, follow.value]);

  const onScroll = () => {
    const pane = box.current as HTMLDivElement;
    const atEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 24;
    // Scrolling up stops following; scrolling to the end resumes it.
    if (follow.peek() !== atEnd) follow.value = atEnd;
  };

  return (
    <>
      <h1 class="title">Logs</h1>
      <form class="toolbar" role="search" onSubmit={(event) => event.preventDefault()}>
        <label>
          <span>Level</span>
          <select value={level.value} onChange={(event) => (level.value = event.currentTarget.value as Level)}>
            {LEVELS.map((one) => (
              <option key={one} value={one}>
                {one}
              </option>
            ))}
          </select>
        </label>
        <label class="wide">
          <span>Search</span>
          <Search change={(text) => (search.value = text)} />
        </label>
        <label class="check">
          <input type="checkbox" checked={follow.value} onChange={(event) => (follow.value = event.currentTarget.checked)} />
          <span>Follow</span>
        </label>
        <button type="button" class="button" disabled={!lines.value.length} onClick={() => download(lines.value)}>
          Download
        </button>
        <a class="button" href="/api/v1/support-bundle" download>
          Support bundle
        </a>
      </form>
      {fault.value && (
        <p class="notice error" role="alert">
          {fault.value}
        </p>
      )}
      <div class="log" ref={box} onScroll={onScroll} tabIndex={0} role="log" aria-live="off" aria-label="Log lines">
        {lines.value.map((line) => (
          <Line key={line.id} line={line} />
        ))}
        {isLoaded.value && !lines.value.length && <p class="empty">{search.value ? "No line matches." : "No lines of this level yet."}</p>}
      </div>
      <p class="quiet">The support bundle holds the configuration, rounds, and logs, without secrets. It is not sent anywhere.</p>
    </>
  );
}

/** Applies the search 250 ms after the last key. */
function Search({ change }: { change(text: string): void }) {
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => () => clearTimeout(timer.current), []);
  return (
    <input
      type="search"
      spellcheck={false}
      onInput={(event) => {
        const text = event.currentTarget.value;
        clearTimeout(timer.current);
        timer.current = setTimeout(() => change(text), 250);
      }}
    />
  );
}

/** A component that renders again only for other properties. */
function memo<Props extends object>(Inner: FunctionComponent<Props>): ComponentType<Props> {
  return class Memo extends Component<Props> {
    override shouldComponentUpdate(next: Readonly<Props>): boolean {
      return (Object.keys(next) as (keyof Props)[]).some((key) => next[key] !== this.props[key]);
    }

    override render() {
      return h(Inner, this.props as Props);
    }
  };
}

const Line = memo(({ line }: { line: LogLine }) => {
  const at = moment(line.at);
  return (
    <div class="line" data-level={line.level}>
      <time dateTime={line.at} title={at === null ? "" : dayAndClock(at)}>
        {at === null ? "" : clockWithSeconds(at, Date.now())}
      </time>
      <span class="level">{line.level}</span>
      <span class="message">
        <span class="logger">{clean(line.logger).replace(/^node\./, "")}</span> <bdi>{clean(line.message)}</bdi>
      </span>
    </div>
  );
});

function download(lines: LogLine[]): void {
  const text = lines.map((line) => `${line.at} ${line.level.toUpperCase().padEnd(7)} ${line.logger}: ${line.message}\n`);
  const url = URL.createObjectURL(new Blob(text, { type: "text/plain" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `diloco-node-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.log`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
