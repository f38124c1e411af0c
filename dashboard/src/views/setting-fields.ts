/** The settings on the page with their labels, and how edits become a PATCH request.
 *
 * The node decides which settings can change and when a change takes effect.
 */

import type { Json } from "../api/client";
import type { Fault, ResolvedConfig } from "../api/schema";

export interface Field {
  /** Dotted, as in the configuration. */
  key: string;
  label: string;
  kind: "text" | "number" | "choice" | "switch" | "hours" | "zone";
  unit?: string;
  help?: string;
  step?: number;
  choices?: [value: string, label: string][];
  /** True for a setting of training, which a relay does not show. */
  trains?: boolean;
}

export interface Group {
  id: string;
  title: string;
  fields: Field[];
  trains?: boolean;
}

/** What most people change. */
export const GROUPS: Group[] = [
  {
    id: "node",
    title: "Node",
    fields: [{ key: "node.name", label: "Name", kind: "text", help: "Other members see this name. If it is empty, they see a short form of the peer id." }],
  },
  {
    id: "schedule",
    title: "Schedule",
    trains: true,
    fields: [
      { key: "schedule.active", label: "Hours", kind: "hours", help: "The hours in which this machine trains. Without hours it always trains." },
      {
        key: "schedule.on_battery",
        label: "On battery",
        kind: "choice",
        choices: [["pause", "pause"], ["run", "keep training"]],
        help: "What a laptop does while it is not plugged in.",
      },
      {
        key: "schedule.user_active",
        label: "While I use the machine",
        kind: "choice",
        choices: [["run", "keep training"], ["pause", "pause"]],
        help: "A pause frees the device at once. Training resumes when you are away.",
      },
    ],
  },
  {
    id: "limits",
    title: "Limits",
    fields: [
      { key: "limits.upload_mbit_s", label: "Upload", kind: "number", unit: "Mbit/s", help: "Speed of sending. 0 means no limit. Other values must be at least 2." },
      { key: "limits.download_mbit_s", label: "Download", kind: "number", unit: "Mbit/s", help: "Speed of receiving. 0 means no limit. Other values must be at least 2." },
      {
        key: "limits.month_gb",
        label: "Traffic a month",
        kind: "number",
        unit: "GB",
        help: "Sent and received together. When it is reached, the node leaves the swarm until the next month. 0 means no limit.",
        trains: true,
      },
      { key: "limits.cpu_threads", label: "CPU threads", kind: "number", step: 1, help: "How many processor cores compute. 0 means all.", trains: true },
      {
        key: "limits.gpu_power_watts",
        label: "GPU power",
        kind: "number",
        unit: "W",
        help: "Less power means less heat and noise, and somewhat slower training. 0 means no limit. The driver must allow the change.",
        trains: true,
      },
      { key: "limits.disk_gb", label: "Disk", kind: "number", unit: "GB", help: "Size of the node's folder. 0 means no limit. The oldest files are removed first." },
    ],
  },
];

/** The rest, in the fold. */
export const ADVANCED: Group[] = [
  {
    id: "more-schedule",
    title: "Schedule",
    trains: true,
    fields: [
      { key: "schedule.timezone", label: "Time zone", kind: "zone", help: "Such as Europe/Berlin. If it is empty, the hours use this machine's time zone." },
      { key: "schedule.user_idle_s", label: "I am away after", kind: "number", unit: "s without input", step: 1, help: "Counts only if the node pauses while you use the machine." },
    ],
  },
  {
    id: "more-limits",
    title: "Limits",
    fields: [
      {
        key: "swarm.relay_mbit_s",
        label: "Relaying",
        kind: "number",
        unit: "Mbit/s",
        help: "Speed of data that this node passes on between other members. 0 means only the limits above. Other values must be at least 2.",
      },
      { key: "limits.gpu_memory_ratio", label: "Share of GPU memory", kind: "number", step: 0.05, help: "From 0 to 1. 0 means no limit. If the model does not fit, the node stops with an error.", trains: true },
    ],
  },
  {
    id: "device-settings",
    title: "Devices",
    trains: true,
    fields: [
      { key: "devices.device", label: "Device", kind: "text", help: "auto means the first GPU, or the CPU if there is no GPU. Others are cpu, cuda, rocm, xpu and mps." },
      {
        key: "devices.precision",
        label: "Precision",
        kind: "choice",
        choices: [["auto", "auto"], ["bf16", "bf16"], ["fp16", "fp16"], ["fp32", "fp32"]],
        help: "The number format of the computation. auto chooses the fastest one that the device has.",
      },
      { key: "devices.micro_batch", label: "Sequences at once", kind: "number", step: 1, help: "0 means as many as fit into memory." },
      {
        key: "devices.compile",
        label: "Compile the layers",
        kind: "choice",
        choices: [["auto", "auto"], ["on", "on"], ["off", "off"]],
        help: "Makes the steps faster. The first start takes half a minute longer. auto compiles on an NVIDIA GPU with bf16, if a C compiler is there.",
      },
      { key: "devices.activation_checkpointing", label: "Checkpoint activations", kind: "switch", help: "Uses less memory but takes a third more time." },
    ],
  },
  {
    id: "disk",
    title: "Checkpoints",
    trains: true,
    fields: [
      { key: "checkpoint.keep", label: "Keep", kind: "number", unit: "newest", step: 1, help: "A checkpoint is a copy of the node's work on the disk." },
      { key: "checkpoint.every_s", label: "Every", kind: "number", unit: "s", help: "A crash loses at most the work since the newest checkpoint." },
    ],
  },
  {
    id: "log",
    title: "Log",
    fields: [
      {
        key: "log.level",
        label: "Level",
        kind: "choice",
        choices: [["debug", "debug"], ["info", "info"], ["warning", "warning"], ["error", "error"]],
        help: "The lowest level that the node writes to its log.",
      },
    ],
  },
];

export interface Preset {
  id: string;
  label: string;
  /** The share of the processor cores. */
  share: number;
  values: Record<string, Json>;
  text(cores: number): string;
}

const threads = (share: number, cores: number) => Math.max(1, Math.floor(share * cores));
const amount = (share: number, cores: number) => `${threads(share, cores)} of ${cores} ${cores === 1 ? "core" : "cores"}`;

/** Full has the defaults of the configuration. */
export const PRESETS: Preset[] = [
  {
    id: "light",
    label: "Light",
    share: 0.25,
    values: { "limits.upload_mbit_s": 5, "limits.download_mbit_s": 20, "swarm.relay_mbit_s": 5, "schedule.user_active": "pause" },
    text: (cores) => `${amount(0.25, cores)}, upload 5 Mbit/s. Pauses while you use the machine.`,
  },
  {
    id: "balanced",
    label: "Balanced",
    share: 0.5,
    values: { "limits.upload_mbit_s": 20, "limits.download_mbit_s": 50, "swarm.relay_mbit_s": 10, "schedule.user_active": "run" },
    text: (cores) => `${amount(0.5, cores)}, upload 20 Mbit/s. Trains while you use the machine.`,
  },
  {
    id: "full",
    label: "Full",
    share: 1,
    values: { "limits.upload_mbit_s": 0, "limits.download_mbit_s": 0, "swarm.relay_mbit_s": 0, "schedule.user_active": "run" },
    text: () => "All cores, and no limit on bandwidth.",
  },
];

export function presetValues(preset: Preset, cores: number): Record<string, Json> {
  return { ...preset.values, "limits.cpu_threads": preset.share === 1 ? 0 : threads(preset.share, cores) };
}

/** The preset with these values; null if there is none. */
export function presetOf(cores: number, value: (key: string) => Json | undefined): string | null {
  const fits = (preset: Preset) => Object.entries(presetValues(preset, cores)).every(([key, one]) => sameValue(value(key), one));
  return PRESETS.find(fits)?.id ?? null;
}

/** The value of a dotted key; undefined if the configuration has none. */
export function valueAt(config: ResolvedConfig["config"], key: string): Json | undefined {
  let found: unknown = config;
  for (const part of key.split(".")) {
    if (found === null || typeof found !== "object" || Array.isArray(found)) return undefined;
    found = (found as Record<string, unknown>)[part];
  }
  return found as Json | undefined;
}

/** Changed values as nested tables. null resets a key. */
export function patch(changes: Record<string, Json>): { [key: string]: Json } {
  const nested: { [key: string]: Json } = {};
  for (const [key, value] of Object.entries(changes)) {
    const parts = key.split(".");
    const last = parts.pop() as string;
    let table = nested;
    for (const part of parts) table = (table[part] ??= {}) as { [key: string]: Json };
    table[last] = value;
  }
  return nested;
}

export function sameValue(a: Json | undefined, b: Json | undefined): boolean {
  return JSON.stringify(a) === JSON.stringify(b);
}

/** Error messages by key; messages without a key are under "". The path of a list's error ends with the element. */
export function byKey(faults: Fault[], keys: string[]): Record<string, string> {
  const found: Record<string, string> = {};
  for (const { where, message } of faults) {
    const key = keys.find((one) => `.${where}.`.includes(`.${one}.`)) ?? "";
    found[key] = found[key] ? `${found[key]} ${message}` : message;
  }
  return found;
}
