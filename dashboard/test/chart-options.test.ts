import { expect, test, vi } from "vitest";

vi.mock("uplot", () => ({ default: { paths: {} } }));
vi.stubGlobal("document", { documentElement: {} });
const { labels } = await import("../src/components/chart-options");
const { OVERVIEW_CHARTS, SWARM_CHARTS } = await import("../src/views/chart-specs");

test.each([...OVERVIEW_CHARTS, ...SWARM_CHARTS].map((spec) => [spec.title, spec] as const))("labels of the value axis of %s differ", (_, spec) => {
  for (const step of spec.steps ?? [0.1, 0.2, 0.25, 0.5]) {
    const from = spec.fromZero || spec.range ? 0 : Math.round(10 / step) * step;
    const shown = labels(spec, [0, 1, 2, 3, 4].map((at) => from + at * step), step);
    expect(new Set(shown).size, `${step}: ${shown.join(", ")}`).toBe(shown.length);
  }
});

test("a chart of few members has whole numbers", () => {
  expect(SWARM_CHARTS[1]?.steps?.slice(0, 4)).toEqual([1, 2, 5, 10]);
});
