/** Pause, resume, leave. */

import { useEffect, useRef, useState } from "preact/hooks";
import { api, sentence } from "../api/client";
import type { Action, PauseOrder, Status } from "../api/types";
import { stale } from "../live/store";
import { Menu } from "../ui/menu";
import { orders } from "../words/states";
import { soon, tomorrowAt } from "../words/time";
import { refused } from "./headline";

const MORNING = 8;

export function Orders({ status }: { status: Status }) {
  const [asking, setAsking] = useState(false);
  const can = orders(status);
  const order = async (action: Action, how?: PauseOrder) => {
    refused.value = "";
    try {
      await api.act(action, how);
    } catch (error) {
      refused.value = sentence(error);
    }
  };
  if (asking && can.leave) return <Asking close={() => setAsking(false)} leave={() => order("leave")} />;
  const morning = tomorrowAt(new Date(), MORNING);
  const round = status.run.round + 1;
  return (
    <div class="orders">
      {can.pause && (
        <Menu
          label="Pause"
          disabled={stale.value}
          items={[
            { label: "For 1 hour", note: `until ${soon(Date.now() + 3_600_000, Date.now())}`, run: () => order("pause", { for_s: 3600 }) },
            { label: "Until tomorrow 8:00", run: () => order("pause", { until: morning.toISOString() }) },
            { label: "After this round", note: `round ${round}`, run: () => order("pause", { after_round: round }) },
            { label: "Until I resume", run: () => order("pause") },
          ]}
        />
      )}
      {can.resume && (
        <button type="button" class="button strong" disabled={stale.value} onClick={() => order("resume")}>
          Resume
        </button>
      )}
      {can.leave && (
        <button type="button" class="button plain" disabled={stale.value} onClick={() => setAsking(true)}>
          Leave
        </button>
      )}
    </div>
  );
}

/** Leaving ends the node: asked once more, in place. */
function Asking({ close, leave }: { close(): void; leave(): void }) {
  const stay = useRef<HTMLButtonElement>(null);
  useEffect(() => stay.current?.focus(), []);
  return (
    <div
      class="orders asking"
      role="group"
      aria-labelledby="leave-question"
      onKeyDown={(event) => event.key === "Escape" && close()}
    >
      <p id="leave-question">Save the work, leave the swarm, and stop this node?</p>
      <button type="button" class="button" ref={stay} onClick={close}>
        Stay
      </button>
      <button
        type="button"
        class="button grave"
        onClick={() => {
          leave();
          close();
        }}
      >
        Leave now
      </button>
    </div>
  );
}
