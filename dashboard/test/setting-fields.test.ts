import { expect, test } from "vitest";
import { byKey, patch, sameValue, valueAt } from "../src/views/setting-fields";

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
