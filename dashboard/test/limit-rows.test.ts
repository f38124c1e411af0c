import { expect, test } from "vitest";
import type { ResolvedConfig } from "../src/api/schema";
import { limitRows } from "../src/views/limit-rows";

const config = (limits: object, schedule: object = {}, swarm: object = {}, pending_restart: string[] = []): ResolvedConfig => ({
  config: { limits, schedule: { active: [], on_battery: "pause", user_active: "run", ...schedule }, swarm: { relay: true, relay_mbit_s: 0, ...swarm } },
  origins: {},
  changeable: {},
  cores: 8,
  timezone: "Europe/Berlin",
  pending_restart,
});

test("a node without limits says what it may use", () => {
  expect(limitRows(config({}), null, false)).toEqual([
    ["Hours", "always, but not on battery"],
    ["Processor", "8 cores"],
    ["Upload", "no limit"],
    ["Download", "no limit"],
    ["Disk", "no limit"],
  ]);
});

test("each limit is shown with its unit", () => {
  const limits = { cpu_threads: 3, gpu_memory_ratio: 0.8, gpu_power_watts: 120, upload_mbit_s: 5, download_mbit_s: 20, disk_gb: 10 };
  const hours = { active: ["mon-fri 22:00-08:00", "sat,sun 00:00-24:00"], user_active: "pause" };
  const rows = limitRows(config(limits, hours, { relay_mbit_s: 2 }), 8e9, false).map((row) => row.map((text) => text.replaceAll("\u202f", " ")));
  expect(rows).toEqual([
    ["Hours", "mon-fri 22:00-08:00 and sat,sun 00:00-24:00 (Europe/Berlin), but not on battery or while you use the machine"],
    ["Processor", "3 of 8 cores"],
    ["GPU", "80 % of its memory, 120 W"],
    ["Upload", "5 Mbit/s"],
    ["Download", "20 Mbit/s"],
    ["Relaying", "2 Mbit/s"],
    ["Disk", "10.0 GB"],
    ["Memory", "8.00 GB, set by the container or service"],
  ]);
});

test("a limit that is not in force yet says so", () => {
  const changed = config({ gpu_memory_ratio: 0, gpu_power_watts: 120 }, {}, {}, ["limits.gpu_memory_ratio", "limits.gpu_power_watts"]);
  expect(limitRows(changed, null, false)).toContainEqual(["GPU", "no limit after pause and resume, 120 W after pause and resume"]);
});

test("a relay has neither hours nor limits of computing", () => {
  const labels = limitRows(config({ cpu_threads: 3 }), null, true).map(([label]) => label);
  expect(labels).toEqual(["Upload", "Download", "Disk"]);
  expect(limitRows(config({}, {}, { relay: false }), null, false)).toContainEqual(["Relaying", "off"]);
});
