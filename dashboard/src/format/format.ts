/** Numbers, durations and moments as text. A narrow space stands before units, so that they do not wrap. */

const SPACE = "\u202f";
export const NONE = "–";

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

/** Three significant digits with an SI prefix: `999`, `1.20 M`. */
function scaled(value: number, unit: string): string {
  let power = 0;
  let rest = Math.abs(value);
  // 999.95 would round up to four digits.
  while (rest >= 999.5 && power < PREFIXES.length - 1) {
    rest /= 1000;
    power += 1;
  }
  const digits = power === 0 ? (Number.isInteger(rest) || rest >= 100 ? 0 : 1) : rest >= 99.95 ? 0 : rest >= 9.995 ? 1 : 2;
  const sign = value < 0 ? "-" : "";
  const name = `${PREFIXES[power]}${unit}`;
  return `${sign}${rest.toFixed(digits)}${name ? SPACE + name : ""}`;
}

type Maybe = number | null | undefined;
const known = (value: Maybe): value is number => typeof value === "number" && Number.isFinite(value);

export function count(value: Maybe): string {
  return known(value) ? scaled(Math.round(value), "") : NONE;
}

/** A count with its noun: `1 token`, `1.20 k tokens`. */
export function many(value: number, one: string): string {
  return `${count(value)} ${Math.round(value) === 1 ? one : `${one}s`}`;
}

export function bytes(value: Maybe): string {
  return known(value) ? scaled(Math.round(value), "B") : NONE;
}

export function bytesPerSecond(value: Maybe): string {
  return known(value) ? `${scaled(Math.round(value), "B")}/s` : NONE;
}

export function tokensPerSecond(value: Maybe): string {
  return known(value) ? `${scaled(Math.round(value), "")}${SPACE}tok/s` : NONE;
}

export function percent(value: Maybe): string {
  if (!known(value)) return NONE;
  const share = value * 100;
  if (share > 0 && share < 0.05) return `<0.1${SPACE}%`;
  // 100 % means all of it, so the last tenths are rounded down.
  if (share >= 99.5 && share < 100) return `${(Math.floor(share * 10) / 10).toFixed(1)}${SPACE}%`;
  return `${share > 0 && share < 9.95 ? share.toFixed(1) : share.toFixed(0)}${SPACE}%`;
}

export function decimals(value: Maybe, digits: number): string {
  return known(value) ? value.toFixed(digits) : NONE;
}

/** A duration in its two largest units: `40 ms`, `1.2 s`, `12 s`, `3 min 20 s`, `2 h 10 min`, `3 d 4 h`. */
export function duration(seconds: Maybe): string {
  if (!known(seconds)) return NONE;
  const s = Math.max(0, seconds);
  if (s === 0) return `0${SPACE}s`;
  if (s < 0.9995) return `${s < 0.0005 ? "<1" : (s * 1000).toFixed(0)}${SPACE}ms`;
  if (s < 9.95) return `${s.toFixed(1)}${SPACE}s`;
  const whole = Math.round(s);
  if (whole < 60) return `${whole}${SPACE}s`;
  if (whole < 3600) return two(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(s / 60);
  if (minutes < 1440) return two(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(s / 3600);
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

function two(large: number, largeUnit: string, small: number, smallUnit: string): string {
  const first = `${large}${SPACE}${largeUnit}`;
  return small ? `${first} ${small}${SPACE}${smallUnit}` : first;
}

/** A duration in its largest unit only, for ages: `12 s`, `3 min`. */
export function brief(seconds: Maybe): string {
  if (!known(seconds)) return NONE;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}${SPACE}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${SPACE}min`;
  if (s < 86400) return `${Math.floor(s / 3600)}${SPACE}h`;
  return `${Math.floor(s / 86400)}${SPACE}d`;
}

/** Hours of work: `24 min`, `1.5 h`, `120 h`. */
export function hours(seconds: Maybe): string {
  if (!known(seconds)) return NONE;
  const h = seconds / 3600;
  if (h < 0.995) return brief(seconds);
  return `${h < 9.95 ? h.toFixed(1) : count(h)}${SPACE}h`;
}

/** Removes trailing zeros for axis labels: `15.0 k` becomes `15 k`. */
export function bare(text: string): string {
  return text.replace(/(\.\d*?)0+(?!\d)/, (_, digits: string) => (digits === "." ? "" : digits));
}

/** A number for axis labels, with the digits in which labels `step` apart differ. */
export function inSteps(value: number, step: number): string {
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

/** The next calendar day at `hour` o'clock local time, even if the clocks change in between. */
export function tomorrowAt(now: Date, hour: number): Date {
  return new Date(now.getFullYear(), now.getMonth(), now.getDate() + 1, hour, 0, 0, 0);
}

/** Milliseconds of an RFC 3339 time; null if it is not valid. */
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

/** A past time to the second: `22:00:05`, or `Sun 22 Nov, 22:00:05` if it is of another day than `now`. */
export function clockWithSeconds(at: number, now: number): string {
  const time = CLOCK_S.format(at);
  return isSameDay(at, now) ? time : `${DAY.format(at)}, ${time}`;
}

export function dayAndClock(at: number): string {
  return `${DAY.format(at)}, ${CLOCK.format(at)}`;
}

/** A time relative to today: `22:00`, `tomorrow 08:00`, `Mon 23 Nov, 08:00`. */
export function soon(at: number, now: number): string {
  if (isSameDay(at, now)) return clock(at);
  return isSameDay(at, tomorrowAt(new Date(now), 0).getTime()) ? `tomorrow ${clock(at)}` : dayAndClock(at);
}

function isSameDay(a: number, b: number): boolean {
  return new Date(a).toDateString() === new Date(b).toDateString();
}

/** Energy in kWh, as on a bill: `350 Wh`, `1.24 kWh`. */
export function energy(joules: Maybe): string {
  if (known(joules) && joules > 0 && joules < 3600) return "under 1 Wh";
  return known(joules) ? scaled(joules / 3600 < 1000 ? Math.round(joules / 3600) : joules / 3600, "Wh") : NONE;
}

/** `1st`, `2nd`, `3rd`, `11th`. */
export function ordinal(value: number): string {
  const tens = value % 100;
  const end = tens > 10 && tens < 14 ? "th" : (["th", "st", "nd", "rd"][value % 10] ?? "th");
  return `${value}${end}`;
}

const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "long" });
const DATE_AND_YEAR = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "long", year: "numeric" });

/** A sentence about the end of the run: `About 5 days left, until 1 December.` */
export function timeLeft(endsAt: string | null, now: number): string {
  const at = moment(endsAt);
  if (at === null) return "The time left is known after some rounds.";
  const hours = Math.max(0, at - now) / 3_600_000;
  if (hours < 1) return "Less than an hour left.";
  if (hours < 47.5) return `About ${plural(Math.round(hours), "hour")} left, until ${soon(at, now)}.`;
  const days = hours / 24;
  const year = new Date(at).getFullYear() === new Date(now).getFullYear();
  const date = (year ? DATE : DATE_AND_YEAR).format(at);
  if (days < 21) return `About ${plural(Math.round(days), "day")} left, until ${date}.`;
  if (days < 70) return `About ${plural(Math.round(days / 7), "week")} left, until ${date}.`;
  if (days < 700) return `About ${plural(Math.round(days / 30.4), "month")} left, until ${date}.`;
  return `About ${plural(Math.round(days / 365), "year")} left, at the present speed.`;
}

function plural(value: number, one: string): string {
  return `${value} ${one}${value === 1 ? "" : "s"}`;
}
