/** A sortable table. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { EXPLANATIONS } from "../format/glossary";
import { explains } from "./term";

export interface Column<Row> {
  id: string;
  label: string;
  key(row: Row): Key;
  cell?(row: Row): ComponentChildren;
  /** Right-aligned, and sorted in descending order first. */
  figure?: boolean;
}

interface Props<Row> {
  caption: string;
  columns: Column<Row>[];
  rows: readonly Row[];
  id(row: Row): string;
  first: Order;
  empty: string;
  rowClass?(row: Row): string | undefined;
}

/** A table shows this many rows at first: a browser is busy for seconds with those of a thousand peers. */
export const ROWS_SHOWN = 100;

export function Table<Row>({ caption, columns, rows, id, first, empty, rowClass }: Props<Row>) {
  const [order, setOrder] = useState(first);
  const [whole, setWhole] = useState(false);
  const by = columns.find((column) => column.id === order.column) ?? (columns[0] as Column<Row>);
  const all = sorted(rows, by.key, order.descending);
  // The row of this node is shown at any place.
  const shown = whole ? all : all.filter((row, at) => at < ROWS_SHOWN || rowClass?.(row) === "marked");
  return (
    <div class="scroller" tabIndex={0} role="region" aria-label={`${caption}, table`}>
      <table>
        <caption class="unseen">{caption}</caption>
        <thead>
          <tr>
            {columns.map((column) => (
              <Head key={column.id} column={column} order={order} turn={setOrder} />
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={id(row)} class={rowClass?.(row)}>
              {columns.map((column, at) => {
                const cell = column.cell ? column.cell(row) : String(column.key(row) ?? "");
                const kind = column.figure ? "figure" : undefined;
                return at === 0 ? (
                  <th scope="row" class={kind} key={column.id}>{cell}</th>
                ) : (
                  <td class={kind} key={column.id}>{cell}</td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
      {!rows.length && <p class="empty">{empty}</p>}
      {shown.length < rows.length && (
        <button
          type="button"
          class="button"
          onClick={({ currentTarget }) => {
            // The button disappears, so the table takes the keyboard focus.
            currentTarget.closest<HTMLElement>(".scroller")?.focus({ preventScroll: true });
            setWhole(true);
          }}
        >
          Show all {rows.length}
        </button>
      )}
    </div>
  );
}

interface HeadProps<Row> {
  column: Column<Row>;
  order: Order;
  turn(order: Order): void;
}

function Head<Row>({ column, order, turn }: HeadProps<Row>) {
  const mine = order.column === column.id;
  const text = EXPLANATIONS[column.label];
  const direction = mine ? (order.descending ? "descending" : "ascending") : undefined;
  return (
    <th scope="col" aria-sort={direction} class={column.figure ? "figure" : undefined}>
      <button type="button" {...(text && { ...explains(text), "aria-description": text })} onClick={() => turn(nextOrder(order, column.id, column.figure ?? false))}>
        {column.label}
        <span class="arrow" aria-hidden="true" />
      </button>
    </th>
  );
}

export type Key = string | number | boolean | null | undefined;
export interface Order {
  column: string;
  descending: boolean;
}

/** A sorted copy. Unknown values come last in both directions, and equal rows keep their order. */
export function sorted<Row>(rows: readonly Row[], key: (row: Row) => Key, descending: boolean): Row[] {
  return [...rows].sort((a, b) => {
    const left = key(a);
    const right = key(b);
    if (left == null || right == null) return Number(left == null) - Number(right == null);
    return (descending ? -1 : 1) * compare(left, right);
  });
}

function compare(a: string | number | boolean, b: string | number | boolean): number {
  if (typeof a === "string" && typeof b === "string") return a.localeCompare(b, "en", { numeric: true });
  return Number(a) - Number(b);
}

/** The order after a click: another column starts in its default direction, the same column reverses. */
export function nextOrder(order: Order, column: string, descendingFirst: boolean): Order {
  return order.column === column ? { column, descending: !order.descending } : { column, descending: descendingFirst };
}
