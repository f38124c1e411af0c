/** The run that this node takes part in: purpose, progress, and this node's share of the work. */

import { signal } from "@preact/signals";
import { api } from "../api/client";
import type { OwnRun, PublicRun, RankedMember, Status } from "../api/schema";
import { Fact, Section } from "../components/text";
import { count, many, NONE, ordinal, percent, timeLeft } from "../format/format";
import { clean, cleanName } from "../format/sanitize";
import { isOutside, sourceName } from "../format/status-text";
import { reconnects, status, usePolling } from "../state/store";

const REFRESH_MS = 30_000;

/** The newest answer. It outlives the worker, which the status does not. */
export const ownRun = signal<OwnRun | null>(null);

export function RunCard() {
  usePolling(
    async () => {
      ownRun.value = await api.run();
    },
    REFRESH_MS,
    [reconnects.value, status.value?.run.manifest_hash],
  );
  if (!ownRun.value?.run.name) return null;
  const { run, own } = ownRun.value;
  const relay = status.value?.node.mode === "relay";
  return (
    <Section title="Run" id="run">
      <h3 class="run-name" data-testid="run-name">
        {cleanName(run.name, 64)}
      </h3>
      {run.purpose && <p class="purpose">{clean(run.purpose)}</p>}
      {relay && !run.tokens ? (
        <p class="whole quiet">A relay does not see the progress of the run. The page of a member shows it.</p>
      ) : (
        <Whole run={run} />
      )}
      <dl class="ledger">
        {!relay && <Share own={own} members={run.members_ever} />}
        <Fact label="Model" note="parameters">
          {count(run.parameters || null)}
        </Fact>
        <Fact label="Members" note={run.members_ever ? `here now, ${count(run.members_ever)} ever` : "here now"}>
          {membersNow(status.value, run)}
        </Fact>
      </dl>
      <p class="quiet text">
        Trained on {run.data.length ? run.data.map(sourceName).map(clean).join(", ") : "text that is not known yet"}
        . {run.model && `Model: ${clean(run.model)}.`}
        {own && run.credit_round !== null && ` Share, rank and streak count up to round ${run.credit_round}.`}
      </p>
    </Section>
  );
}

/** How many members take part now. */
function membersNow(own: Status | null, run: PublicRun): string {
  if (!own) return count(run.members_now);
  // A paused node may hear of no member although some are here.
  return isOutside(own) || (own.phase === "paused" && !own.peers.training) ? NONE : count(own.peers.training);
}

/** Progress of the whole run. */
function Whole({ run }: { run: PublicRun }) {
  const share = Math.min(1, Math.max(0, run.progress_ratio));
  const left =
    run.state === "complete" ? "The run is complete. Thank you."
    : status.value?.run.is_paused || run.state === "paused" ? "The run is paused."
    : run.state === "waiting" ? "The run waits for members."
    : run.state === "unknown" ? "This node does not see the run now."
    : timeLeft(run.ends_at, Date.now());
  return (
    <div class="whole">
      <p>
        <b data-testid="run-progress">{percent(share)}</b>{" "}
        <span>
          {count(run.tokens)} of {many(run.total_tokens, "token")}
        </span>{" "}
        <span class="left">{left}</span>
      </p>
      <div
        class="bar"
        role="progressbar"
        aria-label="Progress of the run"
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={Math.round(share * 1000) / 10}
        aria-valuetext={`${percent(share)}. ${left}`}
      >
        <i style={{ width: `${Math.max(0.3, share * 100).toFixed(2)}%` }} />
      </div>
    </div>
  );
}

function Share({ own, members }: { own: RankedMember | null; members: number }) {
  return (
    <>
      <Fact label="Your share" note={own ? "of all tokens" : "counts from your second round on"}>
        {own ? percent(own.share_ratio) : NONE}
      </Fact>
      <Fact label="Rank" note={own ? `of ${many(members, "member")}` : ""}>
        {own ? ordinal(own.rank) : NONE}
      </Fact>
      <Fact label="Streak" note={own ? "rounds in a row; a missed round starts it again" : ""}>
        {own ? count(own.streak) : NONE}
      </Fact>
    </>
  );
}
