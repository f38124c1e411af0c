/** A table that anybody can sort. Knows columns and rows; knows not what they mean. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { type Key, type Order, sorted, turned } from "../words/sorting";

export interface Column<Row> {
  id: string;
  label: string;
  key(row: Row): Key;
  cell?(row: Row): ComponentChildren;
  /** Figures stand right, and begin with the largest when sorted. */
  figure?: boolean;
}

interface Props<Row> {
  caption: string;
  columns: Column<Row>[];
  rows: readonly Row[];
  id(row: Row): string;
  first: Order;
  empty: string;
  marked?(row: Row): boolean;
}

export function Table<Row>({ caption, columns, rows, id, first, empty, marked }: Props<Row>) {
  const [order, setOrder] = useState(first);
  const by = columns.find((column) => column.id === order.column) ?? (columns[0] as Column<Row>);
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
          {sorted(rows, by.key, order.descending).map((row) => (
            <tr key={id(row)} class={marked?.(row) ? "marked" : undefined}>
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
  const direction = mine ? (order.descending ? "descending" : "ascending") : undefined;
  return (
    <th scope="col" aria-sort={direction} class={column.figure ? "figure" : undefined}>
      <button type="button" onClick={() => turn(turned(order, column.id, column.figure ?? false))}>
        {column.label}
        <span class="arrow" aria-hidden="true" />
      </button>
    </th>
  );
}
