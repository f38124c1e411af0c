/** A chart with a legend, and its values as a table for screen readers. */

import { Signal, useSignal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { History } from "../api/schema";
import { chartColumns, type ChartSpec, type Line, options } from "./chart-options";
import { Term } from "./term";
import { colours } from "./theme";
import { clockWithSeconds, dayAndClock } from "../format/format";
import { EMPTY, newest } from "../state/history";
import "uplot/dist/uPlot.min.css";

const ROWS = 120;

/** `loaded` is null until the node has answered. */
export function Chart({ spec, history: loaded }: { spec: ChartSpec; history: History | null }) {
  const history = loaded ?? EMPTY;
  const at = useSignal<number | null>(null);
  const title = `chart-${spec.id}`;
  const known = spec.lines.some((line) => newest(history.series[line.key]) !== null);
  return (
    <figure class={spec.wide ? "chart wide" : "chart"} aria-labelledby={title}>
      <figcaption>
        <h3 id={title}>
          <Term word={spec.title} />
        </h3>
        <Legend spec={spec} history={history} at={at} />
      </figcaption>
      {known ? <Canvas spec={spec} history={history} at={at} /> : <p class="empty">{loaded ? "No data in this range." : "Loading."}</p>}
      {known && <ValueTable spec={spec} history={history} />}
    </figure>
  );
}

interface Props {
  spec: ChartSpec;
  history: History;
  at: Signal<number | null>;
}

/** The names of the lines with the value under the cursor, or the newest value. */
function Legend({ spec, history, at }: Props) {
  const value = (line: Line) =>
    at.value === null ? newest(history.series[line.key]) : (history.series[line.key]?.[at.value] ?? null);
  const moment = at.value === null ? undefined : history.at_s[at.value];
  return (
    <dl class="legend">
      {spec.lines.map((line) => (
        <div key={line.key}>
          <dt>
            <i class={line.dash ? "swatch dashed" : "swatch"} style={{ color: `var(${line.colour})` }} aria-hidden="true" />
            {line.label}
          </dt>
          <dd>{spec.format(value(line))}</dd>
        </div>
      ))}
      {moment !== undefined && <div class="moment">{clockWithSeconds(moment * 1000, Date.now())}</div>}
    </dl>
  );
}

function Canvas({ spec, history, at }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const colourVersion = colours.value;

  useEffect(() => {
    const box = host.current as HTMLDivElement;
    const drawn = new uPlot(
      options(spec, box.clientWidth, (index) => {
        at.value = index;
      }),
      chartColumns(spec, history.at_s, history.series),
      box,
    );
    plot.current = drawn;
    const watch = new ResizeObserver(() => {
      if (box.clientWidth && box.clientWidth !== drawn.width) drawn.setSize({ width: box.clientWidth, height: drawn.height });
    });
    watch.observe(box);
    return () => {
      watch.disconnect();
      drawn.destroy();
      plot.current = null;
    };
  }, [spec, colourVersion]);

  const shown = useRef(history);
  useEffect(() => {
    if (shown.current === history) return;
    shown.current = history;
    plot.current?.setData(chartColumns(spec, history.at_s, history.series));
  }, [history]);

  return <div class="canvas" ref={host} role="img" aria-label={summary(spec, history)} />;
}

function summary(spec: ChartSpec, history: History): string {
  const parts = spec.lines.map((line) => `${line.label} ${spec.format(newest(history.series[line.key]))}`);
  return `${spec.title}, newest values: ${parts.join(", ")}. The table below has all values.`;
}

/** The values as a table, rendered only when it is opened. */
function ValueTable({ spec, history }: { spec: ChartSpec; history: History }) {
  const [open, setOpen] = useState(false);
  const indexes = open ? history.at_s.map((_, index) => index).reverse().slice(0, ROWS) : [];
  return (
    <details onToggle={(event) => setOpen((event.currentTarget as HTMLDetailsElement).open)}>
      <summary>
        Values <span class="unseen">of the chart {spec.title}</span>
      </summary>
      {open && (
        <div class="scroller tall" tabIndex={0} role="region" aria-label={`${spec.title}, values`}>
          <table class="small">
            <caption class="unseen">{spec.title}</caption>
            <thead>
              <tr>
                <th scope="col">Time</th>
                {spec.lines.map((line) => (
                  <th scope="col" class="figure" key={line.key}>{line.label}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {indexes.map((index) => (
                <tr key={history.at_s[index]}>
                  <th scope="row">{dayAndClock((history.at_s[index] as number) * 1000)}</th>
                  {spec.lines.map((line) => (
                    <td class="figure" key={line.key}>{spec.format(history.series[line.key]?.[index])}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </details>
  );
}
