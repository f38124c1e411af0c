/** The order of tables. Pure. */

export type Key = string | number | boolean | null | undefined;
export interface Order {
  column: string;
  descending: boolean;
}

/** A sorted copy; unknown values come last in either direction, and equals keep their order. */
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

/** Another column begins in its natural direction, the same one turns round. */
export function turned(order: Order, column: string, descendingFirst: boolean): Order {
  return order.column === column ? { column, descending: !order.descending } : { column, descending: descendingFirst };
}
