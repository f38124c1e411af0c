/** When the node needs its owner, and browser notifications about that. The rules are those of `notify.*` in the node.
 *
 * `AlertWatch` is pure: the clock is an argument.
 */

import type { Status } from "../api/schema";
import { moment } from "../format/format";
import { clean, cleanName } from "../format/sanitize";
import { isRelay } from "../format/status-text";

export interface Alert {
  code: string;
  text: string;
}

/** An alert is told when it has lasted this long (a wait: WAITS_MS), and again only after it was gone for GONE_MS. */
export const SETTLE_MS = 10_000;
/** Codes with which a starting node waits for memory, processor, disk or the Hugging Face hub. */
const WAITS = new Set(["does_not_fit", "memory_limit", "no_answer", "too_slow"]);
/** A wait of this length needs the owner. A shorter one may be due to a game or to an outage of the network. */
export const WAITS_MS = 5 * 60_000;
export const GONE_MS = 60_000;
/** A node that has not answered for this long needs its owner. It cannot say so itself. */
export const OFFLINE_MS = 60_000;
/** How often a hidden tab asks the node. */
export const HIDDEN_MS = 60_000;

/** The present alerts: an error, a wait, a node that nobody reaches, a warning, and a newer version. */
export function alertsOf(status: Status): Alert[] {
  const alerts: Alert[] = status.notices
    .filter(({ code, level }) => level !== "info" || code === "newer_version")
    .map(({ code, text }) => ({ code, text }));
  if (status.phase === "error") alerts.push({ code: "error", text: status.reason });
  if (waits(status)) alerts.push({ code: status.code, text: status.reason });
  if (status.reachability_code === "not_reached" && status.reachability_reason && status.node.mode === "train") {
    alerts.push({ code: "unreachable", text: status.reachability_reason });
  }
  return alerts;
}

const waits = ({ phase, code }: Status): boolean => phase === "starting" && WAITS.has(code);

/** No peer has answered for this long: something is wrong. */
export const UNANSWERED_MS = 5 * 60_000;

export interface Health {
  well: boolean;
  text: string;
}

/** Whether something is wrong, in a sentence or two; null for a node that has stopped, whose reason says it. */
export function healthOf(status: Status, now: number): Health | null {
  if (status.phase === "stopped") return null;
  const codes = new Set(alertsOf(status).map(({ code }) => code));
  const unwell = (text: string) => ({ well: false, text });
  if (codes.delete("error")) return unwell("Something is wrong: this machine does not train. The reason is above, and the page Logs says more.");
  const unreachable = codes.delete("unreachable");
  codes.delete("newer_version");
  const lastedMs = now - (moment(status.since) ?? now);
  if (waits(status)) {
    if (lastedMs > WAITS_MS) return unwell("Something needs you: this machine does not train. The reason is above.");
    codes.delete(status.code);
  }
  if (codes.size) return unwell("Something needs you: see the warning below.");
  if (status.phase === "connecting" && status.code === "no_peers" && lastedMs > UNANSWERED_MS) {
    return unwell("Something may be wrong: no member has answered for minutes. Check this machine's connection to the Internet, and ask for a new invite.");
  }
  if (unreachable) return { well: true, text: `${allIsWell(status)} Others cannot connect to this machine, which takes part nevertheless: see Network.` };
  return { well: true, text: `All is well. ${allIsWell(status)}` };
}

function allIsWell(status: Status): string {
  const { code, phase, pause, peers, sync } = status;
  const nothing = "You need to do nothing.";
  if (isRelay(status)) return nothing;
  if (phase === "paused") return pause?.by === "owner" && !pause.until ? "The machine is yours until you resume." : "The machine is yours until the node resumes by itself.";
  if (waits(status)) return "This machine goes on by itself when it can.";
  if (code === "run_paused") return "The whole run is paused. This machine goes on by itself when the run does.";
  if (code === "waiting_for_peers") return "This machine goes on by itself when others come.";
  if (phase !== "training" && phase !== "syncing") return nothing;
  if (sync.last?.outcome === "failed") return "The last round was not completed, and the members try it again.";
  if (peers.training <= 1 && !peers.connected) return "No other member is here now, so this machine trains alone. Its work counts.";
  return nothing;
}

/** Keys of alerts that the node cannot judge yet, because it has just started or was not tested. */
function untested({ phase, reachability_code }: Status): Set<string> {
  const isNew = phase === "starting" || phase === "connecting" || phase === "downloading";
  const keys = isNew || reachability_code === "not_tested" || reachability_code === "disputed" ? ["unreachable"] : [];
  return new Set(isNew ? [...keys, "newer_version"] : keys);
}

/** What identifies an alert. Errors with different reasons are different alerts. */
const keyOf = ({ code, text }: Alert): string => (code === "error" ? `${code}: ${text}` : code);

export class AlertWatch {
  /** Keys of the alerts that were told and are not gone. */
  readonly told: Set<string>;
  private readonly since = new Map<string, number>();
  private readonly goneSince = new Map<string, number>();
  private lostSince: number | null = null;
  /** Whether the node said that it ends, so it is not expected to answer. */
  private ended = false;

  /** `told` is what an earlier watch of the same node has told. */
  constructor(told: Iterable<string> = []) {
    this.told = new Set(told);
  }

  /** The alerts to tell now, for the newest status; null means that the node did not answer. */
  next(status: Status | null, now: number): Alert[] {
    this.lostSince = status === null ? (this.lostSince ?? now) : null;
    if (status === null) {
      if (this.ended || now - (this.lostSince ?? now) < OFFLINE_MS || this.told.has("offline")) return [];
      this.told.add("offline");
      return [{ code: "offline", text: "The node does not answer. Its machine or its program may have stopped." }];
    }
    this.told.delete("offline");
    this.ended = status.final;
    const present = alertsOf(status);
    const keys = new Set(present.map(keyOf));
    for (const key of this.since.keys()) if (!keys.has(key)) this.since.delete(key);
    for (const key of keys) if (!this.since.has(key)) this.since.set(key, now);
    for (const key of this.told) {
      if (keys.has(key) || untested(status).has(key)) this.goneSince.delete(key);
      else if (!this.goneSince.has(key)) this.goneSince.set(key, now);
    }
    for (const [key, from] of this.goneSince) {
      if (now - from < GONE_MS) continue;
      this.goneSince.delete(key);
      this.told.delete(key);
    }
    const lasted = (alert: Alert): number => now - (this.since.get(keyOf(alert)) ?? now);
    const due = present.filter((alert) => !this.told.has(keyOf(alert)) && lasted(alert) >= (WAITS.has(alert.code) ? WAITS_MS : SETTLE_MS));
    for (const alert of due) this.told.add(keyOf(alert));
    return due;
  }
}

/** Shows a notification. Browsers that allow none from a page throw. */
export function notify(node: string, alert: Alert): void {
  try {
    const body = clean(alert.text).replaceAll("`", "");
    const shown = new Notification(`${cleanName(node || "diloco-node", 40)} needs you`, { body, tag: `diloco-${keyOf(alert)}` });
    shown.onclick = () => {
      focus();
      shown.close();
    };
  } catch {
    // The page itself shows the same text.
  }
}
