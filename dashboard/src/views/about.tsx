/** Versions, data folder and ids of this node. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api } from "../api/client";
import type { Version } from "../api/schema";
import { Section } from "../components/text";
import { dayAndClock, moment } from "../format/format";
import { clean } from "../format/sanitize";
import { reconnects, status } from "../state/store";

export function About() {
  const version = useSignal<Version | null>(null);
  useEffect(() => {
    api.version().then(
      (found) => {
        version.value = found;
      },
      () => undefined,
    );
  }, [reconnects.value]);
  const now = status.value;
  const found = version.value;
  const startedAt = moment(now?.node.started_at);
  const newer = now?.notices.find((notice) => notice.code === "newer_version");
  const rows: [string, string | undefined][] = [
    ["diloco-node", found ? `${found.version}${found.revision ? ` (${found.revision.slice(0, 12)})` : ""}` : now?.node.version],
    ["torch", found?.torch],
    ["hivemind", found?.hivemind],
    ["Python", found?.python],
    ["Started", startedAt === null ? undefined : dayAndClock(startedAt)],
    ["Data folder", now?.node.data_dir],
    ["Peer id", now?.node.peer_id],
    ["Run", now?.run.manifest_hash],
  ];
  return (
    <Section title="About" id="about">
      {newer && (
        <p class="notice info" data-notice="newer_version">
          <b>Note</b> {clean(newer.text)}
        </p>
      )}
      <dl class="about">
        {rows.map(
          ([label, value]) =>
            value && (
              <div key={label}>
                <dt>{label}</dt>
                <dd>{clean(value)}</dd>
              </div>
            ),
        )}
      </dl>
      <p class="quiet">
        <a href="/api/v1/status">Full status</a>, <a href="/openapi.json">API description</a>, <a href="/metrics">metrics</a>.
      </p>
    </Section>
  );
}
