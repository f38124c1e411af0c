/** Moments. Knows the calendar of the machine that shows the page; the present moment is always an argument. */

/** The next calendar day at `hour` o'clock by local time, whatever the clocks do that night. */
export function tomorrowAt(now: Date, hour: number): Date {
  return new Date(now.getFullYear(), now.getMonth(), now.getDate() + 1, hour, 0, 0, 0);
}

/** Milliseconds of an RFC 3339 moment; null where it is none. */
export function moment(text: string | null | undefined): number | null {
  const at = text ? Date.parse(text) : Number.NaN;
  return Number.isNaN(at) ? null : at;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const CLOCK_S = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { weekday: "short", day: "numeric", month: "short" });

export function clock(at: number): string {
  return CLOCK.format(at);
}

export function clockWithSeconds(at: number): string {
  return CLOCK_S.format(at);
}

export function dayAndClock(at: number): string {
  return `${DAY.format(at)}, ${CLOCK.format(at)}`;
}

/** A moment as one would say it today: `22:00`, `tomorrow 08:00`, `Mon 23 Nov, 08:00`. */
export function soon(at: number, now: number): string {
  const then = new Date(at);
  const today = new Date(now);
  const sameDay = (a: Date, b: Date) => a.toDateString() === b.toDateString();
  if (sameDay(then, today)) return clock(at);
  return sameDay(then, tomorrowAt(today, 0)) ? `tomorrow ${clock(at)}` : dayAndClock(at);
}
