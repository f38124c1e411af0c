import { expect, test } from "vitest";
import {
  ADVANCED, byKey, GROUPS, patch, type Preset, presetOf, PRESETS, presetValues, sameValue, valueAt,
} from "../src/views/setting-fields";

const config = { limits: { upload_mbit_s: 0 }, schedule: { active: ["mon 00:00-24:00"] } };

test("valueAt reads dotted keys", () => {
  expect(valueAt(config, "limits.upload_mbit_s")).toBe(0);
  expect(valueAt(config, "limits.disk_gb")).toBeUndefined();
  expect(valueAt(config, "schedule.active.0")).toBeUndefined();
});

test("a patch is nested and contains only changes; null resets", () => {
  expect(patch({ "limits.upload_mbit_s": 20, "limits.disk_gb": null, "node.name": "x" })).toEqual({
    limits: { upload_mbit_s: 20, disk_gb: null },
    node: { name: "x" },
  });
});

test("lists are compared by value", () => {
  expect(sameValue(["a"], ["a"])).toBe(true);
  expect(sameValue(0, "0")).toBe(false);
});

test("errors are assigned to their field; others are kept", () => {
  const faults = [
    { where: "limits.upload_mbit_s", message: "Too small." },
    { where: "body.schedule.active.0", message: "No such day." },
    { where: "schedule.active.1", message: "No such hour." },
    { where: "other", message: "Odd." },
  ];
  expect(byKey(faults, ["limits.upload_mbit_s", "schedule.active"])).toEqual({
    "limits.upload_mbit_s": "Too small.",
    "schedule.active": "No such day. No such hour.",
    "": "Odd.",
  });
});

test("each preset is recognised by its values, and other values are nobody's", () => {
  for (const cores of [1, 2, 8, 64]) {
    const shown = PRESETS.map((preset) => presetValues(preset, cores));
    PRESETS.forEach((preset, at) => {
      expect(presetOf(cores, (key) => shown[at]?.[key])).toBe(preset.id);
      expect(shown[at]?.["limits.cpu_threads"]).toBeLessThanOrEqual(cores);
    });
  }
  expect(presetValues(PRESETS[0] as Preset, 8)["limits.cpu_threads"]).toBe(2);
  expect(presetOf(8, (key) => ({ ...presetValues(PRESETS[1] as Preset, 8), "limits.upload_mbit_s": 7 })[key])).toBeNull();
});

test("every setting explains itself, and a preset changes only settings that are shown", () => {
  const fields = [...GROUPS, ...ADVANCED].flatMap((group) => group.fields);
  for (const field of fields) expect(field.help, field.key).toMatch(/\.$/);
  const keys = fields.map((field) => field.key);
  expect(new Set(keys).size).toBe(keys.length);
  for (const preset of PRESETS) for (const key of Object.keys(presetValues(preset, 4))) expect(keys).toContain(key);
});
