/** The newest rounds as a strip, oldest left: a mark for the outcome, a row for each peer, a bar for the seconds. */

import { useEffect, useRef, useState } from "preact/hooks";
import { type Outcome, type RoundRecord, STAGES } from "../api/types";
import { attendance, type Attendance, presence } from "../live/attendance";
import { move } from "../ui/menu";
import { Ago, Name, Prose } from "../ui/text";
import { bytes, decimals, duration, many } from "../words/units";

/** Told apart by shape first, so that no colour is needed. */
const MARKS: Record<Outcome | "dropped", { mark: string; words: string }> = {
  complete: { mark: "●", words: "complete" },
  partial: { mark: "◐", words: "partial" },
  failed: { mark: "✕", words: "failed" },
  skipped: { mark: "○", words: "taken over from the others" },
  alone: { mark: "–", words: "alone" },
  dropped: { mark: "↩", words: "dropped after a split" },
};

const BAR_PX = 44;

const isDrop = (record: RoundRecord) => (record.dropped ?? 0) > 0;
const outcome = (record: RoundRecord) => (isDrop(record) ? "dropped" : record.outcome);
const work = (record: RoundRecord) => STAGES.reduce((sum, stage) => sum + record.seconds[stage], 0);
const keyOf = (record: RoundRecord) => `${record.round}/${record.outcome}/${record.started_at}`;

export function Rounds({ rounds }: { rounds: RoundRecord[] | null }) {
  const [picked, setPicked] = useState<string | null>(null);
  const strip = useRef<HTMLDivElement>(null);
  const newest = rounds?.[0]?.round;
  const any = newest !== undefined;
  useEffect(() => {
    // The newest is at the right end, which is what a narrow screen shows.
    const box = strip.current;
    if (picked !== null || !box) return;
    const watch = new ResizeObserver(() => {
      box.scrollLeft = box.scrollWidth;
    });
    watch.observe(box);
    watch.observe(box.firstElementChild as Element);
    return () => watch.disconnect();
  }, [any, picked]);
  if (!rounds?.length) {
    return (
      <p class="plain" data-testid="rounds">
        {rounds ? "No round has been taken yet. The first one is due when enough members are ready." : "Asking the node."}
      </p>
    );
  }
  const shown = [...rounds].reverse();
  const at = shown.find((record) => keyOf(record) === picked) ?? (shown.at(-1) as RoundRecord);
  const longest = Math.max(...shown.map(work), 0.001);
  const who = attendance(rounds);
  return (
    <>
      <div class="strip">
        <Who who={who} longest={longest} />
        <div class="scroller" ref={strip}>
          <div
            class="columns"
            role="listbox"
            aria-label={shown.length === 1 ? "The last round" : `The last ${shown.length} rounds`}
            aria-orientation="horizontal"
            data-testid="rounds"
            onKeyDown={(event) => {
              const all = [...(strip.current?.querySelectorAll<HTMLElement>("[role=option]") ?? [])];
              if (move(event.key, all, "x")) event.preventDefault();
            }}
          >
            {shown.map((record) => (
              <Column
                key={keyOf(record)}
                record={record}
                who={who}
                longest={longest}
                selected={record === at}
                pick={() => setPicked(record === shown.at(-1) ? null : keyOf(record))}
              />
            ))}
          </div>
        </div>
      </div>
      <Key />
      <Detail record={at} />
    </>
  );
}

function sentence(record: RoundRecord): string {
  const inside = record.members.filter((member) => member.included).length;
  const members = record.members.length ? `, ${inside} of ${record.members.length} in` : "";
  return `Round ${record.round}, ${MARKS[outcome(record)].words}${members}, ${duration(work(record))}`;
}

/** What the rows are. Each column says it again in words, so this is for the eye only. */
function Who({ who, longest }: { who: Attendance; longest: number }) {
  return (
    <div class="who" aria-hidden="true">
      {who.crowded ? (
        <span>in, of</span>
      ) : (
        who.peers.map(({ peer_id, name }) => (
          <span key={peer_id}>
            <Name text={name || peer_id.slice(-6)} most={24} />
          </span>
        ))
      )}
      <em>{duration(longest)}</em>
    </div>
  );
}

interface ColumnProps {
  record: RoundRecord;
  who: Attendance;
  longest: number;
  selected: boolean;
  pick(): void;
}

function Column({ record, who, longest, selected, pick }: ColumnProps) {
  const total = work(record);
  return (
    <div
      role="option"
      tabIndex={selected ? 0 : -1}
      aria-selected={selected}
      aria-label={sentence(record)}
      data-outcome={outcome(record)}
      title={sentence(record)}
      onFocus={pick}
      onClick={(event) => event.currentTarget.focus()}
    >
      <span class="mark" aria-hidden="true">
        {MARKS[outcome(record)].mark}
      </span>
      <span class="cells" aria-hidden="true">
        {who.crowded ? (
          <b>
            {record.members.filter((member) => member.included).length}
            <br />
            {record.members.length}
          </b>
        ) : (
          who.peers.map(({ peer_id }) => <i key={peer_id} class={presence(record, peer_id)} />)
        )}
      </span>
      <span class="foot" aria-hidden="true">
        <span class="bars" style={{ height: `${Math.max(total > 0 ? 2 : 0, (total / longest) * BAR_PX)}px` }}>
          {STAGES.map((stage) => (
            <i key={stage} class={stage} style={{ flexGrow: String(record.seconds[stage] / total || 0) }} />
          ))}
        </span>
      </span>
    </div>
  );
}

function Key() {
  return (
    <p class="key" aria-hidden="true">
      {Object.entries(MARKS).map(([name, { mark, words }]) => (
        <span key={name}>
          <b>{mark}</b> {words}
        </span>
      ))}
      <span>
        <i class="in" /> in
      </span>
      <span>
        <i class="out" /> left out
      </span>
      {STAGES.map((stage) => (
        <span key={stage}>
          <i class={stage} /> {stage}
        </span>
      ))}
    </p>
  );
}

function Detail({ record }: { record: RoundRecord }) {
  const away = record.members.filter((member) => !member.included);
  return (
    <div class="round" aria-live="off">
      <h3>
        Round {record.round} <small>{MARKS[outcome(record)].words}</small>
        {record.state_digest && (
          <small>
            state <code>{record.state_digest.slice(0, 12)}</code>
          </small>
        )}
      </h3>
      {record.reason && (
        <p class="plain">
          <Prose text={record.reason} />
        </p>
      )}
      {isDrop(record) && (
        <p class="plain">
          {record.dropped === 1 ? "This round does" : `${record.dropped} rounds, ending with this one, do`} not hold any
          more.
        </p>
      )}
      <dl class="readings">
        <div>
          <dt>Begun</dt>
          <dd>
            <Ago at={record.started_at} /> <small>ago</small>
          </dd>
        </div>
        {[...STAGES, "blocked" as const].map((stage) => (
          <div key={stage}>
            <dt>{stage === "blocked" ? "Trainer stood still" : stage}</dt>
            <dd>{duration(record.seconds[stage])}</dd>
          </div>
        ))}
        <div>
          <dt>Sent, received</dt>
          <dd>
            {bytes(record.bytes_sent)}, {bytes(record.bytes_received)}
          </dd>
        </div>
        <div>
          <dt>Evaluation before</dt>
          <dd>{decimals(record.evaluation_loss, 3)}</dd>
        </div>
      </dl>
      {record.members.length > 0 && (
        <ul class="members">
          {record.members.map((member) => (
            <li key={member.peer_id} class={member.included ? "in" : "out"}>
              <Name text={member.name} most={24} />{" "}
              <small>{member.included ? many(member.weight, "token") : "left out"}</small>
            </li>
          ))}
        </ul>
      )}
      {away.length > 0 && <p class="quiet">What was left out is not lost: its tokens are carried into the next rounds.</p>}
    </div>
  );
}
