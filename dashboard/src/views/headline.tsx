/** The state in one word, its reason, since when; the owner's three orders; the way to the next sync. */

import { signal } from "@preact/signals";
import type { Status } from "../api/types";
import { ageS, now as clock, stale, state } from "../live/store";
import { Ago, Prose } from "../ui/text";
import { clean } from "../words/clean";
import { isRelay, reason, startAgain } from "../words/states";
import { moment, soon } from "../words/time";
import { brief, decimals, duration, percent, tokensPerSecond } from "../words/units";
import { Orders } from "./orders";

/** What the last order came to, when it was refused. */
export const refused = signal("");

export function Headline({ status }: { status: Status }) {
  return (
    <>
      <div class="headline">
        <div>
          <h1 class="word" data-testid="state">
            {state.value.word}
          </h1>
          <p class="reason" data-testid="reason">
            <Prose text={reason(status, clock.value)} />
          </p>
          {(!stale.value || status.final) && <p class="meaning">{state.value.meaning}</p>}
          <Again status={status} />
          <p class="since">
            <span>
              <Ago at={status.since} prefix="For " />
            </span>
            <Until status={status} />
          </p>
        </div>
        <Orders status={status} />
      </div>
      {stale.value && (
        <p class={status.final ? "notice info" : "notice error"} data-testid="stale">
          {status.final ? "What stands here is the last that it told," : "The node does not answer. What stands here is"}{" "}
          {brief(ageS.value)} {status.final ? "ago" : "old"}. This page goes on by itself when the node is back at this
          address.
        </p>
      )}
      {refused.value && (
        <p class="notice error" role="alert">
          <Prose text={refused.value} />
        </p>
      )}
      {status.notices?.map((notice) => (
        <p key={notice.code} class={`notice ${notice.level}`} data-notice={notice.code}>
          <b>{{ info: "Note", warning: "Warning", error: "Error" }[notice.level]}</b> <Prose text={notice.text} />
        </p>
      ))}
      {!isRelay(status) && <Ruler status={status} />}
    </>
  );
}

/** How a node that has ended is brought back. */
function Again({ status }: { status: Status }) {
  const command = startAgain(status);
  if (command === null) return null;
  return (
    <p class="again" data-testid="again">
      Start it again as you did before, or with <code>{clean(command)}</code>
    </p>
  );
}

/** What ends the present state, where that is known and the reason does not say it. */
function Until({ status }: { status: Status }) {
  const facts: string[] = [];
  const until = moment(status.pause?.until);
  const next = moment(status.schedule_next);
  if (until !== null && status.phase !== "paused") facts.push(`Until ${soon(until, clock.value)}`);
  if (status.pause?.after_round != null && status.phase !== "paused") {
    facts.push(`Pauses after round ${status.pause.after_round}`);
  }
  if (next !== null && next !== until) facts.push(`Schedule turns ${soon(next, clock.value)}`);
  return (
    <>
      {facts.map((fact) => (
        <span key={fact}>{fact}</span>
      ))}
    </>
  );
}

/** The way to the next sync, on a scale. */
function Ruler({ status }: { status: Status }) {
  const { training, sync, run, phase } = status;
  const moving = phase === "training" || phase === "syncing" || phase === "draining";
  const share = moving ? Math.min(1, Math.max(0, sync.progress_ratio)) : 0;
  const eta = sync.eta_s === null || !moving ? null : Math.max(0, sync.eta_s - (stale.value ? 0 : ageS.value));
  const text = `Round ${run.round + 1}: ${percent(share)} of the way to the next sync`;
  return (
    <div class="ruler" data-moving={moving}>
      <div
        class="scale"
        role="progressbar"
        aria-label="Way to the next sync"
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={Math.round(share * 100)}
        aria-valuetext={text}
      >
        <i style={{ width: `${(share * 100).toFixed(1)}%` }} />
      </div>
      <dl class="readings">
        <div>
          <dt>Round</dt>
          <dd>{run.round + 1}</dd>
        </div>
        <div>
          <dt>Inner step</dt>
          <dd>
            {training.inner_step} <small>of {training.inner_steps}</small>
          </dd>
        </div>
        <div>
          <dt>Next sync</dt>
          <dd>{phase === "syncing" ? (sync.stage === "idle" ? "now" : sync.stage) : eta === null ? "–" : eta < 1 ? "due" : `in ${duration(Math.round(eta))}`}</dd>
        </div>
        <div>
          <dt>Loss</dt>
          <dd>
            {decimals(training.loss, 3)} <small>evaluated {decimals(training.evaluation_loss, 3)}</small>
          </dd>
        </div>
        <div>
          <dt>Speed</dt>
          <dd>{tokensPerSecond(moving ? training.tokens_per_second : 0)}</dd>
        </div>
      </dl>
    </div>
  );
}
