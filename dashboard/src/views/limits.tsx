/** How much of this machine the node may use now. */

import { useSignal } from "@preact/signals";
import { api } from "../api/client";
import type { ResolvedConfig, Status } from "../api/schema";
import { Section } from "../components/text";
import { clean } from "../format/sanitize";
import { isRelay } from "../format/status-text";
import { reconnects, usePolling } from "../state/store";
import { limitRows } from "./limit-rows";

const REFRESH_MS = 30_000;

export function Limits({ status }: { status: Status }) {
  const config = useSignal<ResolvedConfig | null>(null);
  usePolling(
    async () => {
      config.value = await api.config();
    },
    REFRESH_MS,
    [reconnects.value, JSON.stringify(status.limits)],
  );
  if (!config.value) return null;
  return (
    <Section title="Limits" id="limits" aside={<a href="#/settings">Change</a>}>
      <dl class="about">
        {limitRows(config.value, status.node.memory_limit_bytes, isRelay(status)).map(([label, text]) => (
          <div key={label}>
            <dt>{label}</dt>
            <dd>{clean(text)}</dd>
          </div>
        ))}
      </dl>
    </Section>
  );
}
