/** What the run's founder has changed while the run runs: who, what, from which round on, and what was refused. */

import { useSignal } from "@preact/signals";
import { api } from "../api/client";
import type { AmendmentInfo, GovernanceInfo, RefusedAmendment } from "../api/schema";
import { Prose, Section } from "../components/text";
import { clean } from "../format/sanitize";
import { amendmentState, governedBy } from "../format/status-text";
import { reconnects, status, usePolling } from "../state/store";

const REFRESH_MS = 15_000;

export function Amendments() {
  const found = useSignal<GovernanceInfo | null>(null);
  const run = status.value?.run;
  usePolling(
    async () => {
      found.value = await api.amendments();
    },
    REFRESH_MS,
    [reconnects.value, run?.manifest_hash, run?.amendments, run?.is_paused],
  );
  const governance = found.value;
  if (!governance || (governance.mode === "fixed" && !governance.amendments.length && !governance.refused.length)) return null;
  return (
    <Section title="Amendments" id="amendments">
      <p class="plain" data-testid="run-state">
        <strong>{governance.is_paused ? "The run is paused: no member trains until it is resumed." : "The run is not paused."}</strong>{" "}
        {governedBy(governance)}
      </p>
      {governance.amendments.length + governance.refused.length > 0 && (
        <ol class="events">
          {[...governance.refused].reverse().map((one, at) => (
            <Refused key={`${one.digest} ${at}`} one={one} />
          ))}
          {[...governance.amendments].reverse().map((one) => (
            <Line key={one.digest} one={one} />
          ))}
        </ol>
      )}
    </Section>
  );
}

function Refused({ one: { number, change, reason } }: { one: RefusedAmendment }) {
  return (
    <li data-kind="node">
      <span>
        <b>{number > 0 ? `${number}. ${clean(change)}` : "An amendment"}</b> <Prose text={`Refused: ${reason}.`} />
      </span>
    </li>
  );
}

function Line({ one }: { one: AmendmentInfo }) {
  return (
    <li data-kind="node">
      <span>
        <b>{`${one.number}. ${clean(one.change)}`}</b> {amendmentState(one)}{" "}
        <span class="quiet">{`Signed by ${one.signers.map((signer) => clean(signer).slice(-6)).join(", ")}.`}</span>
      </span>
    </li>
  );
}
