/** Builds uPlot options from the description of a chart. */

import uPlot from "uplot";
import { resolve } from "./theme";
import { bare } from "../format/format";
import { stack } from "../state/history";

export interface Line {
  key: string;
  label: string;
  /** A custom property of the style sheet. */
  colour: string;
  dash?: number[];
  width?: number;
  /** Connects known values over gaps and marks each with a dot, for rare measurements. */
  sparse?: boolean;
  /** Stacked in the order of the lines. */
  stacked?: boolean;
}

export interface ChartSpec {
  id: string;
  title: string;
  lines: Line[];
  format(value: number | null | undefined): string;
  /** Labels of the value axis, if `format` is too long. `step` is the distance between two. */
  axis?(value: number, step: number): string;
  /** Allowed distances between labels of the value axis, ascending. Labels of neighbours differ. */
  steps?: number[];
  /** Full width. */
  wide?: boolean;
  /** Fixed limits of the value axis; by default they follow the data. */
  range?: [number, number];
  /** The value axis starts at zero. */
  fromZero?: boolean;
  bars?: boolean;
}

type Columns = Record<string, (number | null)[]>;
const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const HEIGHT = 172;

/** The columns for uPlot. The stacked sums come first, the largest sum first, so that smaller sums are painted over it. */
export function chartColumns(spec: ChartSpec, at_s: number[], series: Columns): uPlot.AlignedData {
  const column = (line: Line) => series[line.key] ?? new Array<null>(at_s.length).fill(null);
  const stackedLines = stack(spec.lines.filter((line) => line.stacked).map(column)).reverse();
  const otherLines = spec.lines.filter((line) => !line.stacked).map(column);
  return [at_s, ...stackedLines, ...otherLines] as uPlot.AlignedData;
}

export function options(spec: ChartSpec, width: number, onCursor: (at: number | null) => void): uPlot.Options {
  const ink = resolve("--ink-3");
  const grid = resolve("--line");
  const axis = { stroke: ink, font: FONT, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
  const stackedLines = spec.lines.filter((line) => line.stacked).reverse();
  const otherLines = spec.lines.filter((line) => !line.stacked);
  return {
    width,
    height: HEIGHT,
    padding: [10, 28, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, sync: { key: "history" }, y: false, points: { size: 5 } },
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)] },
    scales: { x: { time: true }, y: scale(spec) },
    axes: [
      { ...axis, grid: { show: false }, space: labelSpace, incrs: STEPS_S, size: 30, gap: 9, values: times },
      { ...axis, size: 58, space: 34, ...(spec.steps && { incrs: spec.steps }), values: (_plot, splits, _axis, _space, step) => labels(spec, splits, step) },
    ],
    series: [{}, ...stackedLines.map((line) => area(line, spec.bars ?? false)), ...otherLines.map(stroke)],
  };
}

/** The labels of the value axis. */
export function labels(spec: ChartSpec, splits: number[], step: number): string[] {
  return splits.map((at) => bare(spec.axis ? spec.axis(at, step) : spec.format(at)));
}

function scale(spec: ChartSpec): uPlot.Scale {
  if (spec.range) return { range: spec.range };
  return {
    range: (_plot, low, high) => {
      if (low == null || high == null) return [0, 1];
      if (spec.fromZero) return [0, high > 0 ? high * 1.08 : 10];
      const labelSpace = (high - low || Math.abs(high) || 1) * 0.08;
      return [low - labelSpace, high + labelSpace];
    },
  };
}

function area(line: Line, bars: boolean): uPlot.Series {
  const colour = resolve(line.colour);
  // Shares describe a time span, so they are drawn as steps.
  const paths = bars ? uPlot.paths.bars?.({ size: [0.7, 14] }) : uPlot.paths.stepped?.({ align: 1 });
  return { label: line.label, fill: colour, stroke: colour, width: 0, points: { show: false }, ...(paths && { paths }) };
}

const known = (column: ArrayLike<number | null | undefined> | undefined) =>
  Array.from(column ?? []).filter((value) => value != null).length;

function stroke(line: Line): uPlot.Series {
  return {
    label: line.label,
    stroke: resolve(line.colour),
    width: line.width ?? 1.5,
    spanGaps: line.sparse ?? false,
    // A line with one point needs a visible point.
    points: { show: (plot, at) => line.sparse || known(plot.data[at]) < 2, size: 4, width: 0, fill: resolve(line.colour) },
    ...(line.dash && { dash: line.dash }),
  };
}

const HOUR = 3600;
const DAY = 24 * HOUR;
/** Allowed distances between labels of durations and of the time axis, from a second on. */
export const STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR,
  DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 56 * DAY, 112 * DAY, 365 * DAY,
];

/** Minimum pixels between labels. Labels within a minute include seconds. */
function labelSpace(_plot: uPlot, _axis: number, low: number, high: number, pixels: number): number {
  const close = 52;
  return (close * (high - low)) / pixels <= 30 ? 76 : close;
}

/** Times, and the date at midnight. */
function times(_plot: uPlot, splits: number[], _axis: number, _space: number, step: number): string[] {
  return splits.map((at) => {
    const then = new Date(at * 1000);
    const midnight = then.getHours() === 0 && then.getMinutes() === 0;
    if (step >= 24 * HOUR || midnight) return then.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    const seconds: Intl.DateTimeFormatOptions = step < 60 ? { second: "2-digit" } : {};
    return then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...seconds });
  });
}
