/** The editor of the weekly schedule, with a chart of the week. */

import { DAY_NAMES, DAYS, formatHours, type Hours, parseHours, week } from "../format/weekly-hours";

interface Props {
  id: string;
  value: string[];
  disabled: boolean;
  describedBy: string;
  change(value: string[]): void;
}

const EVENING: Hours = { days: [0, 1, 2, 3, 4], from: "22:00", to: "08:00" };

export function HoursEditor({ id, value, disabled, describedBy, change }: Props) {
  const parsed = value.map(parseHours);
  const set = (at: number, text: string) => change(value.map((old, index) => (index === at ? text : old)));
  return (
    <div class="hours" id={id} role="group" tabIndex={-1} aria-labelledby={`${id}-label`} aria-describedby={describedBy}>
      <Week hours={parsed.filter((hours) => hours !== null)} always={!value.length} />
      {value.map((text, at) => {
        const hours = parsed[at];
        const remove = () => {
          change(value.filter((_, index) => index !== at));
          // The button disappears with its row, so this one takes the keyboard focus.
          document.getElementById(`${id}-add`)?.focus();
        };
        return (
          <fieldset key={at} disabled={disabled}>
            <legend class="unseen">Hours {at + 1}</legend>
            {hours ? (
              <Span hours={hours} change={(next) => set(at, formatHours(next))} />
            ) : (
              <input type="text" aria-label="Hours as text" value={text} onInput={(event) => set(at, event.currentTarget.value)} />
            )}
            <button type="button" class="text" onClick={remove}>
              Remove<span class="unseen"> hours {at + 1}</span>
            </button>
          </fieldset>
        );
      })}
      <button type="button" id={`${id}-add`} class="button" disabled={disabled} onClick={() => change([...value, formatHours(EVENING)])}>
        Add hours
      </button>
    </div>
  );
}

function Span({ hours, change }: { hours: Hours; change(hours: Hours): void }) {
  const toggle = (day: number) => {
    const days = hours.days.includes(day) ? hours.days.filter((one) => one !== day) : [...hours.days, day].sort();
    if (days.length) change({ ...hours, days });
  };
  return (
    <>
      <span class="days">
        {DAYS.map((day, at) => (
          <button
            type="button"
            key={day}
            aria-pressed={hours.days.includes(at)}
            title={DAY_NAMES[at]}
            onClick={() => toggle(at)}
          >
            <span aria-hidden="true">{day.slice(0, 2)}</span>
            <span class="unseen">{DAY_NAMES[at]}</span>
          </button>
        ))}
      </span>
      <span class="together">
        <input
          type="time"
          aria-label="From"
          value={hours.from}
          onChange={(event) => event.currentTarget.value && change({ ...hours, from: event.currentTarget.value })}
        />
        <span>to</span>
        <input
          type="time"
          aria-label="To"
          value={hours.to === "24:00" ? "00:00" : hours.to}
          onChange={({ currentTarget: { value } }) => value && change({ ...hours, to: value === "00:00" ? "24:00" : value })}
        />
      </span>
    </>
  );
}

/** A chart of the week, hidden from screen readers, which read the time spans instead. */
function Week({ hours, always }: { hours: Hours[]; always: boolean }) {
  const spans = always ? DAYS.map(() => [[0, 24] as [number, number]]) : week(hours);
  return (
    <div class="week" aria-hidden="true">
      {spans.map((day, at) => (
        <div key={at}>
          <b>{DAYS[at]?.slice(0, 2)}</b>
          <span>
            {day.map(([from, to]) => (
              <i key={from} style={{ left: `${(from / 24) * 100}%`, width: `${((to - from) / 24) * 100}%` }} />
            ))}
          </span>
        </div>
      ))}
      <p>
        <span>0</span>
        <span>6</span>
        <span>12</span>
        <span>18</span>
        <span>24</span>
      </p>
    </div>
  );
}
