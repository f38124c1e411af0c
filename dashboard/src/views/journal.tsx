/** What happened lately: who joined, left or fell silent, and what this node did. */

import { useSignal } from "@preact/signals";
import { api } from "../api/client";
import type { JournalEntry } from "../api/schema";
import { Name, Prose, Section } from "../components/text";
import { clock, dayAndClock, moment } from "../format/format";
import { reconnects, state, status, usePolling } from "../state/store";

const REFRESH_MS = 10_000;
const ENTRIES = 100;
const SHOWN = 6;

export function Journal() {
  const entries = useSignal<JournalEntry[] | null>(null);
  const peers = status.value?.peers;
  const fault = usePolling(
    async () => {
      entries.value = await api.journal(ENTRIES);
    },
    REFRESH_MS,
    [reconnects.value, state.value.word, peers?.connected, peers?.training],
  );
  const all = entries.value ?? [];
  const empty = entries.value ? "Nothing has happened since the node started." : fault || "Loading.";
  return (
    <Section title="Events" id="events">
      {all.length ? <Entries entries={all.slice(0, SHOWN)} /> : <p class="plain">{empty}</p>}
      {all.length > SHOWN && (
        <details class="earlier">
          <summary>Earlier events</summary>
          <Entries entries={all.slice(SHOWN)} />
        </details>
      )}
    </Section>
  );
}

function Entries({ entries }: { entries: JournalEntry[] }) {
  return (
    <ol class="events">
      {entries.map((entry, at) => (
        <li key={`${entry.at} ${entry.peer_id} ${at}`} data-kind={entry.kind}>
          <Clock at={entry.at} />
          <span>
            {entry.kind !== "node" && (
              <>
                <Name text={entry.name} most={28} />{" "}
              </>
            )}
            <Prose text={entry.text} />
          </span>
        </li>
      ))}
    </ol>
  );
}

/** The time of an event, with its date if that was not today. */
function Clock({ at }: { at: string }) {
  const then = moment(at);
  if (then === null) return null;
  const today = new Date(then).toDateString() === new Date().toDateString();
  return (
    <time dateTime={at} title={dayAndClock(then)}>
      {today ? clock(then) : dayAndClock(then)}
    </time>
  );
}
