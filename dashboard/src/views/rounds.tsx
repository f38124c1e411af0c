/** A strip of the newest rounds, oldest on the left, with the outcome, participants and duration of each round. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { Outcome, RoundRecord } from "../api/schema";
import { move } from "../components/menu";
import { Term } from "../components/term";
import { Ago, Name, Prose } from "../components/text";
import { bytes, decimals, duration, many } from "../format/format";
import { participants, type Participants, presence } from "../state/records";

/** Each outcome has a shape of its own, so it can be told without colours. */
const MARKS: Record<Outcome | "dropped", { mark: string; words: string }> = {
  complete: { mark: "●", words: "complete" },
  partial: { mark: "◐", words: "partial" },
  failed: { mark: "✕", words: "failed" },
  skipped: { mark: "○", words: "adopted from the others" },
  alone: { mark: "–", words: "alone" },
  dropped: { mark: "↩", words: "dropped after a split" },
};

const STAGES = ["rendezvous", "reduce", "commit", "apply"] as const;
const BAR_PX = 44;

const isDrop = (record: RoundRecord) => (record.dropped ?? 0) > 0;
const outcome = (record: RoundRecord) => (isDrop(record) ? "dropped" : record.outcome);
const work = (record: RoundRecord) => STAGES.reduce((sum, stage) => sum + record.seconds[stage], 0);
const keyOf = (record: RoundRecord) => `${record.round}/${record.outcome}/${record.started_at}`;

/** `fault` says why there are no rounds yet, if the node did not answer. */
export function Rounds({ rounds, fault }: { rounds: RoundRecord[] | null; fault: string }) {
  const [picked, setPicked] = useState<string | null>(null);
  const strip = useRef<HTMLDivElement>(null);
  const newest = rounds?.[0]?.round;
  const any = newest !== undefined;
  useEffect(() => {
    // A narrow screen shows the right end, which is the newest round.
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
        {rounds ? "No round yet. The first one starts when enough members are ready." : fault || "Loading."}
      </p>
    );
  }
  const shown = [...rounds].reverse();
  const at = shown.find((record) => keyOf(record) === picked) ?? (shown.at(-1) as RoundRecord);
  const longest = Math.max(...shown.map(work), 0.001);
  const who = participants(rounds);
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

/** Labels of the rows. Each column repeats them in its own label for screen readers. */
function Who({ who, longest }: { who: Participants; longest: number }) {
  return (
    <div class="who" aria-hidden="true">
      {who.crowded ? (
        <span>included, all</span>
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
  who: Participants;
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
        {(record.attempts ?? 1) > 1 && <small>{record.attempts} attempts</small>}
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
          {record.dropped === 1 ? "This round does" : `${record.dropped} rounds, ending with this one, do`} no longer
          count.
        </p>
      )}
      <dl class="readings">
        <div>
          <dt>Started</dt>
          <dd>
            <Ago at={record.started_at} /> <small>ago</small>
          </dd>
        </div>
        {[...STAGES, "blocked" as const].map((stage) => (
          <div key={stage}>
            <dt>
              <Term word={stage === "blocked" ? "Training paused for sync" : stage} />
            </dt>
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
          <dt>Evaluation loss before</dt>
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
      {away.length > 0 && <p class="quiet">A contribution that was left out is carried for up to two rounds, and then discarded.</p>}
    </div>
  );
}
