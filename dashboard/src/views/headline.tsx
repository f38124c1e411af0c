/** State, reason and time; the actions of the owner; progress to the next sync. */

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { type Action, api, errorText } from "../api/client";
import type { PauseOrder, Status } from "../api/schema";
import { Menu } from "../components/menu";
import { Term } from "../components/term";
import { Ago, Prose } from "../components/text";
import { brief, decimals, duration, moment, percent, soon, tokensPerSecond, tomorrowAt } from "../format/format";
import { clean } from "../format/sanitize";
import { healthOf } from "../state/alerts";
import { availableActions, isMoving, isOutside, isRelay, reason, restartCommand, trainsFor } from "../format/status-text";
import { ageS, now as clock, stale, state, word } from "../state/store";

/** Error text of the last action. */
export const actionError = signal("");

export function Headline({ status }: { status: Status }) {
  const gone = stale.value && !status.final;
  // The error is about a state that has passed.
  useEffect(() => {
    actionError.value = "";
  }, [word.value]);
  return (
    <>
      <div class="headline">
        <div>
          <h1 class="word" data-testid="state">
            {word.value}
          </h1>
          <p class="reason" data-testid="reason">
            {gone ? `Last state: ${state.value.word}, ${brief(ageS.value)} ago.` : <Prose text={reason(status, clock.value)} />}
          </p>
          {!gone && <p class="meaning">{trainsFor(status) ?? state.value.meaning}</p>}
          {!gone && <HealthLine status={status} />}
          <RestartHint status={gone ? { ...status, final: true } : status} />
          <p class="since">
            <span>
              {!gone && <Ago at={status.since} prefix={status.code === "training" || status.code === "syncing" ? "At work for " : `${word.value} for `} />}
            </span>
            <UpcomingChanges status={status} />
          </p>
        </div>
        <Actions status={status} />
      </div>
      {stale.value && (
        <p class={status.final ? "notice info" : "notice error"} data-testid="stale">
          {status.final ? "The node has ended." : "Something is wrong: the node does not answer. Its program or its machine may have stopped. If it stays so, start it again: your credit is safe."}{" "}
          Showing data from {brief(ageS.value)} ago. This page reconnects automatically.
        </p>
      )}
      {actionError.value && (
        <p class="notice error" role="alert">
          <Prose text={actionError.value} />
        </p>
      )}
      {status.notices.map((notice) => (
        <p key={notice.code} class={`notice ${notice.level}`} data-notice={notice.code}>
          <b>{{ info: "Note", warning: "Warning", error: "Error" }[notice.level]}</b> <Prose text={notice.text} />
        </p>
      ))}
      {!isRelay(status) && <Progress status={status} />}
    </>
  );
}

/** Whether something is wrong. */
function HealthLine({ status }: { status: Status }) {
  const health = healthOf(status, clock.value);
  if (health === null || status.final) return null;
  return (
    <p class={health.well ? "health" : "health unwell"} data-testid="health">
      <span aria-hidden="true">{health.well ? "✓" : "!"}</span> {health.text}
    </p>
  );
}

/** How to start a node that has ended. */
function RestartHint({ status }: { status: Status }) {
  const command = restartCommand(status);
  if (command === null) return null;
  return (
    <p class="again" data-testid="again">
      Start it again as you did before, or with <code>{clean(command)}</code>
    </p>
  );
}

/** When the current state will change, if that is known and the reason does not say it. */
function UpcomingChanges({ status }: { status: Status }) {
  // Neither a schedule nor a pause starts a node that has ended, or is about to.
  if (isOutside(status) && status.phase !== "paused") return null;
  if (status.phase === "draining" || status.phase === "leaving") return null;
  const facts: string[] = [];
  const until = moment(status.pause?.until);
  const next = moment(status.schedule_next);
  if (until !== null && status.code === "pausing") facts.push(`Until ${soon(until, clock.value)}`);
  if (status.pause?.after_round != null && status.phase !== "paused") {
    facts.push(`Pauses after round ${status.pause.after_round}`);
  }
  if (next !== null && next !== until) facts.push(`Schedule changes ${soon(next, clock.value)}`);
  return (
    <>
      {facts.map((fact) => (
        <span key={fact}>{fact}</span>
      ))}
    </>
  );
}

/** Progress to the next sync. */
function Progress({ status }: { status: Status }) {
  const { training, sync, run, phase } = status;
  const moving = isMoving(status);
  const share = moving ? Math.min(1, Math.max(0, sync.progress_ratio)) : 0;
  const eta = sync.eta_s === null || !moving ? null : Math.max(0, sync.eta_s - (stale.value ? 0 : ageS.value));
  const text = `Round ${run.round + 1}: ${percent(share)} of the way to the next sync`;
  return (
    <div class="ruler" data-moving={moving}>
      <div
        class="scale"
        role="progressbar"
        aria-label="Progress to the next sync"
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={Math.round(share * 100)}
        aria-valuetext={text}
      >
        <i style={{ width: `${(share * 100).toFixed(1)}%` }} />
      </div>
      <dl class="readings">
        <Reading label="Round">{run.round + 1}</Reading>
        {sync.round_s === null ? (
          <Reading label="Inner step">
            {training.inner_step} <small>of {training.inner_steps}</small>
          </Reading>
        ) : (
          <Reading label="This round">
            {duration(Math.round(share * sync.round_s))} <small>of {duration(Math.round(sync.round_s))}</small>
          </Reading>
        )}
        <Reading label="Next sync">
          {moving && phase === "syncing" ? (sync.stage === "idle" ? "now" : sync.stage) : eta === null ? "–" : eta < 1 ? "due" : `in ${duration(Math.round(eta))}`}
        </Reading>
        <Reading label="Loss">
          {decimals(training.loss, 3)} <small>evaluated {decimals(training.evaluation_loss, 3)}</small>
        </Reading>
        <Reading label="Speed">{tokensPerSecond(moving ? training.tokens_per_second || null : 0)}</Reading>
      </dl>
    </div>
  );
}

function Reading({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <div>
      <dt>
        <Term word={label} />
      </dt>
      <dd>{children}</dd>
    </div>
  );
}

const MORNING = 8;

function Actions({ status }: { status: Status }) {
  const [confirming, setConfirming] = useState(false);
  const can = availableActions(status);
  const box = useRef<HTMLDivElement>(null);
  const hadFocus = useRef(false);
  // A button that disappears, because its action is done, must not lose the keyboard focus.
  useLayoutEffect(() => {
    if (hadFocus.current && document.activeElement === document.body) box.current?.querySelector("button")?.focus();
  }, [can.pause, can.resume, can.leave, confirming]);
  const runAction = async (action: Action, how?: PauseOrder) => {
    actionError.value = "";
    try {
      await api.act(action, how);
    } catch (error) {
      actionError.value = errorText(error);
    }
  };
  if (confirming && can.leave) {
    return (
      <LeaveConfirmation
        canDrain={can.drain}
        close={() => {
          hadFocus.current = true;
          setConfirming(false);
        }}
        run={(action) => void runAction(action)}
      />
    );
  }
  const morning = tomorrowAt(new Date(), MORNING);
  const round = status.run.round + 1;
  return (
    <div
      class="orders"
      ref={box}
      onFocusIn={() => {
        hadFocus.current = true;
      }}
      onFocusOut={({ relatedTarget }) => {
        if (relatedTarget !== null) hadFocus.current = false;
      }}
    >
      {can.pause && (
        <Menu
          label="Pause"
          disabled={stale.value}
          items={[
            { label: "For 1 hour", note: `until ${soon(Date.now() + 3_600_000, Date.now())}`, run: () => runAction("pause", { for_s: 3600 }) },
            { label: "Until tomorrow 8:00", run: () => runAction("pause", { until: morning.toISOString() }) },
            { label: "After this round", note: `round ${round}`, run: () => runAction("pause", { after_round: round }) },
            { label: "Until I resume", run: () => runAction("pause") },
          ]}
        />
      )}
      {can.resume && (
        <button type="button" class="button strong" disabled={stale.value} onClick={() => runAction("resume")}>
          Resume
        </button>
      )}
      {can.leave && (
        <button type="button" class="button" disabled={stale.value} onClick={() => setConfirming(true)}>
          Leave
        </button>
      )}
      {(can.pause || can.leave) && (
        <p class="quiet order-notes" id="order-notes">
          {stale.value ? (
            "The buttons work again when the node answers."
          ) : (
            <>
              {can.pause && "Pause gives your machine back within seconds; Resume continues. "}
              {can.leave && "Leave stops this node; you can start it again. Your credit stays."}
            </>
          )}
        </p>
      )}
    </div>
  );
}

/** Asks for confirmation, because leaving ends the node. */
function LeaveConfirmation({ canDrain, close, run }: { canDrain: boolean; close(): void; run(action: Action): void }) {
  const stay = useRef<HTMLButtonElement>(null);
  useLayoutEffect(() => stay.current?.focus(), []);
  const order = (action: Action) => {
    run(action);
    close();
  };
  return (
    <div
      class="orders asking"
      role="group"
      aria-labelledby="leave-question"
      onKeyDown={(event) => event.key === "Escape" && close()}
    >
      <p id="leave-question">Save the work, leave the swarm, and stop this node? Your credit stays, and you can start it again.</p>
      <button type="button" class="button" ref={stay} onClick={close}>
        Stay
      </button>
      {canDrain && (
        <button type="button" class="button" onClick={() => order("drain")}>
          After this round
        </button>
      )}
      <button type="button" class="button grave" onClick={() => order("leave")}>
        Leave now
      </button>
    </div>
  );
}
