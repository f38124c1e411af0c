/** Small text components: names of peers, times, labelled values, sections. */

import type { ComponentChildren } from "preact";
import { brief, dayAndClock, moment, NONE } from "../format/format";
import { clean, cleanName } from "../format/sanitize";
import { now } from "../state/store";
import { Term } from "./term";

/** The name of a peer, isolated from the text direction around it. */
export function Name({ text, most }: { text: string; most?: number }) {
  const shown = cleanName(text, 256);
  return (
    <bdi class="name" title={shown}>
      {cleanName(text, most)}
    </bdi>
  );
}

/** A sentence from the node. Text in backticks is shown as code. */
export function Prose({ text }: { text: string }) {
  return <>{clean(text).split("`").map((part, at) => (at % 2 ? <code key={at}>{part}</code> : part))}</>;
}

/** The age of a time, with the time as title. */
export function Ago({ at, prefix = "" }: { at: string | null | undefined; prefix?: string }) {
  const then = moment(at);
  if (then === null) return <>{NONE}</>;
  return (
    <time dateTime={at ?? ""} title={dayAndClock(then)}>
      {prefix}
      {brief((now.value - then) / 1000)}
    </time>
  );
}

/** A labelled value of a description list. */
export function Fact({ label, note, children }: { label: string; note?: string; children: ComponentChildren }) {
  return (
    <div class="fact">
      <dt>
        <Term word={label} />
      </dt>
      <dd>
        {children}
        {note && <small>{note}</small>}
      </dd>
    </div>
  );
}

/** A section of a view: heading in the margin, content next to it. */
export function Section(props: { title: string; id: string; aside?: ComponentChildren; children: ComponentChildren }) {
  return (
    <section class="section" aria-labelledby={props.id}>
      <header>
        <h2 id={props.id}>{props.title}</h2>
        {props.aside}
      </header>
      <div class="content">{props.children}</div>
    </section>
  );
}
