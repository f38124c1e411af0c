/** The limits of the node as text. */

import type { ResolvedConfig } from "../api/schema";
import { bytes, many, percent } from "../format/format";
import { valueAt } from "./setting-fields";

/** What is limited, and how. The traffic of the month is in the section of the month. */
export function limitRows({ config, cores, pending_restart, timezone }: ResolvedConfig, memoryBytes: number | null, relay: boolean): [label: string, text: string][] {
  /** The text of a limit, `none` if it is 0. A change that is not in force yet says so. */
  const limit = (key: string, words: (value: number) => string, none = "") => {
    const value = Number(valueAt(config, key) ?? 0);
    const text = value ? words(value) : none;
    return pending_restart.includes(key) ? `${text || "no limit"} after pause and resume` : text;
  };
  const mbit = (value: number) => `${value} Mbit/s`;
  const gpu = [limit("limits.gpu_memory_ratio", (share) => `${percent(share)} of its memory`), limit("limits.gpu_power_watts", (watts) => `${watts} W`)];
  const training: [string, string][] = [
    ["Hours", hoursText(config, timezone)],
    ["Processor", limit("limits.cpu_threads", (threads) => `${Math.min(threads, cores)} of ${many(cores, "core")}`, many(cores, "core"))],
    ["GPU", gpu.filter(Boolean).join(", ")],
  ];
  const rows: [string, string][] = [
    ...(relay ? [] : training),
    ["Upload", limit("limits.upload_mbit_s", mbit, "no limit")],
    ["Download", limit("limits.download_mbit_s", mbit, "no limit")],
    ["Relaying", valueAt(config, "swarm.relay") === false ? "off" : limit("swarm.relay_mbit_s", mbit)],
    ["Disk", limit("limits.disk_gb", (size) => bytes(1e9 * size), "no limit")],
    ["Memory", memoryBytes === null ? "" : `${bytes(memoryBytes)}, set by the container or service`],
  ];
  return rows.filter(([, text]) => text);
}

/** When the node trains: `mon-fri 22:00-08:00 (Europe/Berlin), but not on battery`. */
function hoursText(config: ResolvedConfig["config"], timezone: string): string {
  const windows = (valueAt(config, "schedule.active") ?? []) as string[];
  const zone = timezone === "machine" ? "time of the node's machine" : timezone;
  const unless = [
    valueAt(config, "schedule.on_battery") === "pause" && "on battery",
    valueAt(config, "schedule.user_active") === "pause" && "while you use the machine",
  ].filter(Boolean);
  const hours = windows.length ? `${windows.join(" and ")} (${zone})` : "always";
  return unless.length ? `${hours}, but not ${unless.join(" or ")}` : hours;
}
