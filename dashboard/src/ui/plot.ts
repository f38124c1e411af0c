/** From a chart's description to uPlot's options. Knows uPlot; knows no component. */

import uPlot from "uplot";
import { stack } from "../live/history";
import { bare } from "../words/units";
import { resolve } from "./theme";

export interface Line {
  key: string;
  label: string;
  /** A custom property of the style sheet. */
  colour: string;
  dash?: number[];
  width?: number;
  /** Joined over unknown moments, with a dot at each known one: for what is measured now and then. */
  sparse?: boolean;
  /** Part of the pile, in the order of the lines. */
  stacked?: boolean;
}

export interface ChartSpec {
  id: string;
  title: string;
  lines: Line[];
  format(value: number | null | undefined): string;
  /** For the marks of the value axis, where `format` says too much. */
  axis?(value: number): string;
  /** Takes the whole width. */
  wide?: boolean;
  /** Fixed ends of the value axis; otherwise they follow the data. */
  range?: [number, number];
  /** The value axis begins at zero. */
  fromZero?: boolean;
  bars?: boolean;
}

type Columns = Record<string, (number | null)[]>;
const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const HEIGHT = 172;

/** uPlot's columns. The pile's sums come first and the tallest first, so that each is painted over by those below it. */
export function aligned(spec: ChartSpec, at_s: number[], series: Columns): uPlot.AlignedData {
  const column = (line: Line) => series[line.key] ?? new Array<null>(at_s.length).fill(null);
  const piled = stack(spec.lines.filter((line) => line.stacked).map(column)).reverse();
  const free = spec.lines.filter((line) => !line.stacked).map(column);
  return [at_s, ...piled, ...free] as uPlot.AlignedData;
}

export function options(spec: ChartSpec, width: number, onCursor: (at: number | null) => void): uPlot.Options {
  const ink = resolve("--ink-3");
  const grid = resolve("--line");
  const axis = { stroke: ink, font: FONT, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
  const piled = spec.lines.filter((line) => line.stacked).reverse();
  const free = spec.lines.filter((line) => !line.stacked);
  return {
    width,
    height: HEIGHT,
    padding: [10, 28, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, sync: { key: "history" }, y: false, points: { size: 5 } },
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)] },
    scales: { x: { time: true }, y: scale(spec) },
    axes: [
      { ...axis, grid: { show: false }, space: room, incrs: STEPS_S, size: 30, gap: 9, values: times },
      { ...axis, size: 58, space: 34, values: (_plot, splits) => splits.map((at) => bare((spec.axis ?? spec.format)(at))) },
    ],
    series: [{}, ...piled.map((line) => area(line, spec.bars ?? false)), ...free.map(stroke)],
  };
}

function scale(spec: ChartSpec): uPlot.Scale {
  if (spec.range) return { range: spec.range };
  return {
    range: (_plot, low, high) => {
      if (low == null || high == null) return [0, 1];
      if (spec.fromZero) return [0, high > 0 ? high * 1.08 : 10];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [low - room, high + room];
    },
  };
}

function area(line: Line, bars: boolean): uPlot.Series {
  const colour = resolve(line.colour);
  // Shares belong to a span of time, not to a moment: no slopes between them.
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
    // A line of one point would not be seen.
    points: { show: (plot, at) => line.sparse || known(plot.data[at]) < 2, size: 4, width: 0, fill: resolve(line.colour) },
    ...(line.dash && { dash: line.dash }),
  };
}

const HOUR = 3600;
const DAY = 24 * HOUR;
/** Between two marks of the time axis. */
const STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR,
  DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 56 * DAY, 112 * DAY, 365 * DAY,
];

/** Pixels from mark to mark: marks within a minute tell the seconds too. */
function room(_plot: uPlot, _axis: number, low: number, high: number, pixels: number): number {
  const close = 52;
  return (close * (high - low)) / pixels <= 30 ? 76 : close;
}

/** Clock times, and the day where one begins. */
function times(_plot: uPlot, splits: number[], _axis: number, _space: number, step: number): string[] {
  return splits.map((at) => {
    const then = new Date(at * 1000);
    const midnight = then.getHours() === 0 && then.getMinutes() === 0;
    if (step >= 24 * HOUR || midnight) return then.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    const seconds: Intl.DateTimeFormatOptions = step < 60 ? { second: "2-digit" } : {};
    return then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...seconds });
  });
}
