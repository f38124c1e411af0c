/** The hours of a weekly schedule, as the node formats them: `mon-fri 22:00-08:00`, `sat,sun 00:00-24:00`. Pure. */

export const DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"] as const;
export const DAY_NAMES = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"] as const;

export interface Hours {
  /** Indexes into DAYS, ascending. */
  days: number[];
  /** `HH:MM`; an end at or before the start lies on the next day, and `24:00` is the day's end. */
  from: string;
  to: string;
}

const SHAPE = /^\s*([a-z,\s-]+?)\s+(\d{1,2}:\d{2})\s*-\s*(\d{1,2}:\d{2})\s*$/i;

/** Returns null if the text has another form; the user then edits it as text. */
export function parseHours(text: string): Hours | null {
  const match = SHAPE.exec(text);
  const days = match && parseDays(match[1] as string);
  const from = match && parseClock(match[2] as string, 23);
  const to = match && parseClock(match[3] as string, 24);
  return days && from && to ? { days, from, to } : null;
}

export function formatHours({ days, from, to }: Hours): string {
  const parts: string[] = [];
  for (let at = 0; at < days.length; ) {
    let end = at;
    while (days[end + 1] === (days[end] as number) + 1) end += 1;
    const first = DAYS[days[at] as number] as string;
    const last = DAYS[days[end] as number] as string;
    if (end - at >= 2) parts.push(`${first}-${last}`);
    else parts.push(...(end > at ? [first, last] : [first]));
    at = end + 1;
  }
  return `${parts.join(",")} ${from}-${to}`;
}

/** Spans of each weekday in hours, for the chart. A span over midnight is split between both days. */
export function week(hours: Hours[]): [number, number][][] {
  const spans: [number, number][][] = DAYS.map(() => []);
  for (const { days, from, to } of hours) {
    const start = hoursOf(from);
    const end = hoursOf(to);
    for (const day of days) {
      if (end > start) spans[day]?.push([start, end]);
      else {
        spans[day]?.push([start, 24]);
        if (end > 0) spans[(day + 1) % 7]?.push([0, end]);
      }
    }
  }
  return spans;
}

/** In which time zone the hours are. `node` is `machine` for a zone without a name. */
export function zoneNote(node: string, browser: string): string {
  const zone = node === "machine" ? "the time zone of the node's machine" : node;
  return isSameZone(node, browser) ? `Times are in ${zone}.` : `Times are in ${zone}. This browser is in ${browser}.`;
}

function isSameZone(node: string, browser: string): boolean {
  try {
    // Names such as Etc/UTC and UTC are the same zone.
    return new Intl.DateTimeFormat("en", { timeZone: node }).resolvedOptions().timeZone === browser;
  } catch {
    return false;
  }
}

function parseDays(text: string): number[] | null {
  const found = new Set<number>();
  for (const part of text.toLowerCase().split(",")) {
    const [first, last, more] = part.trim().split("-").map((name) => DAYS.indexOf(name.trim() as (typeof DAYS)[number]));
    if (first === undefined || first < 0 || (last ?? 0) < 0 || more !== undefined) return null;
    // A range may cross the end of the week.
    for (let day = first; ; day = (day + 1) % 7) {
      found.add(day);
      if (day === (last ?? first)) break;
    }
  }
  return [...found].sort((a, b) => a - b);
}

function parseClock(text: string, hourMax: number): string | null {
  const [hour, minute] = text.split(":").map(Number) as [number, number];
  if (hour > hourMax || minute > 59 || (hour === 24 && minute > 0)) return null;
  return `${String(hour).padStart(2, "0")}:${String(minute).padStart(2, "0")}`;
}

function hoursOf(clock: string): number {
  const [hour, minute] = clock.split(":").map(Number) as [number, number];
  return hour + minute / 60;
}
