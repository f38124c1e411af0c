/** Small pieces of text: strangers' names, moments, a fact with its label. */

import type { ComponentChildren } from "preact";
import { now } from "../live/store";
import { clean, cleanName } from "../words/clean";
import { brief, NONE } from "../words/units";
import { dayAndClock, moment } from "../words/time";

/** A stranger's name: one text node, isolated from the direction of the text around it. */
export function Name({ text, most }: { text: string; most?: number }) {
  const shown = cleanName(text, 256);
  return (
    <bdi class="name" title={shown}>
      {cleanName(text, most)}
    </bdi>
  );
}

/** A sentence of the node's, in which backticks stand around what belongs to the command line. */
export function Prose({ text }: { text: string }) {
  return <>{clean(text).split("`").map((part, at) => (at % 2 ? <code key={at}>{part}</code> : part))}</>;
}

/** How long ago, with the moment itself in the title. */
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

/** A figure with its label, as one item of a description list. */
export function Fact({ label, note, children }: { label: string; note?: string; children: ComponentChildren }) {
  return (
    <div class="fact">
      <dt>{label}</dt>
      <dd>
        {children}
        {note && <small>{note}</small>}
      </dd>
    </div>
  );
}

/** A part of a view: its heading in the margin, its content beside it. */
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
