/** Which settings the page offers, in which words. Whether one can change, and when that holds, the node says. */

export interface Field {
  /** Dotted, as in the configuration. */
  key: string;
  label: string;
  kind: "text" | "number" | "choice" | "switch" | "hours" | "zone";
  unit?: string;
  help?: string;
  step?: number;
  choices?: [value: string, label: string][];
  /** Says nothing to a relay, which trains nothing. */
  trains?: boolean;
}

export interface Group {
  id: string;
  title: string;
  fields: Field[];
  trains?: boolean;
}

export const GROUPS: Group[] = [
  {
    id: "node",
    title: "Node",
    fields: [{ key: "node.name", label: "Name", kind: "text", help: "Shown to the other members. Empty: a short form of the peer id." }],
  },
  {
    id: "schedule",
    title: "Schedule",
    trains: true,
    fields: [
      { key: "schedule.active", label: "Hours", kind: "hours", help: "When this machine trains; no hours: always." },
      { key: "schedule.timezone", label: "Time zone", kind: "zone", help: "Such as Europe/Berlin. Empty: this machine's." },
      { key: "schedule.on_battery", label: "On battery", kind: "choice", choices: [["pause", "pause"], ["run", "go on training"]] },
      { key: "schedule.user_active", label: "While I use the machine", kind: "choice", choices: [["run", "go on training"], ["pause", "pause"]] },
      { key: "schedule.user_idle_s", label: "I am away after", kind: "number", unit: "s without input", step: 1 },
    ],
  },
  {
    id: "limits",
    title: "Limits",
    fields: [
      { key: "limits.upload_mbit_s", label: "Upload", kind: "number", unit: "Mbit/s", help: "0: no limit, else at least 2." },
      { key: "limits.download_mbit_s", label: "Download", kind: "number", unit: "Mbit/s", help: "0: no limit, else at least 2." },
      { key: "swarm.relay_mbit_s", label: "Relaying", kind: "number", unit: "Mbit/s", help: "For members that cannot reach each other. 0: within upload and download, else at least 2." },
      { key: "limits.cpu_threads", label: "CPU threads", kind: "number", step: 1, help: "0: all cores.", trains: true },
      { key: "limits.gpu_memory_ratio", label: "Share of GPU memory", kind: "number", step: 0.05, help: "0 to 1; 0: no limit.", trains: true },
      { key: "limits.gpu_power_watts", label: "GPU power", kind: "number", unit: "W", help: "0: no cap. Only where the driver allows it.", trains: true },
      { key: "limits.disk_gb", label: "Disk", kind: "number", unit: "GB", help: "0: no limit. The oldest goes first." },
    ],
  },
  {
    id: "device-settings",
    title: "Devices",
    trains: true,
    fields: [
      { key: "devices.device", label: "Device", kind: "text", help: "auto: the first GPU, else the CPU." },
      { key: "devices.precision", label: "Precision", kind: "choice", choices: [["auto", "auto"], ["bf16", "bf16"], ["fp16", "fp16"], ["fp32", "fp32"]] },
      { key: "devices.micro_batch", label: "Sequences at once", kind: "number", step: 1, help: "0: as many as fit." },
      { key: "devices.compile", label: "Compile the layers", kind: "switch", help: "Minutes at the start, faster steps after." },
      { key: "devices.activation_checkpointing", label: "Checkpoint activations", kind: "switch", help: "Less memory, a third more time." },
    ],
  },
  {
    id: "disk",
    title: "Checkpoints",
    trains: true,
    fields: [
      { key: "checkpoint.keep", label: "Keep", kind: "number", unit: "newest", step: 1 },
      { key: "checkpoint.every_s", label: "At least every", kind: "number", unit: "s" },
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
      },
    ],
  },
];
