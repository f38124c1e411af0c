/** The input element of one setting. */

import { useRef } from "preact/hooks";
import type { Json } from "../api/client";
import { HoursEditor } from "./hours";
import type { Field } from "./setting-fields";

interface Props {
  field: Field;
  id: string;
  value: Json;
  disabled: boolean;
  invalid: boolean;
  describedBy: string;
  change(value: Json): void;
}

export function Control({ field, id, value, disabled, invalid, describedBy, change }: Props) {
  const common = { id, disabled, "aria-invalid": invalid, "aria-describedby": describedBy };
  switch (field.kind) {
    case "choice":
      return (
        <select {...common} value={String(value)} onChange={(event) => change(event.currentTarget.value)}>
          {choices(field, String(value)).map(([one, label]) => (
            <option key={one} value={one}>
              {label}
            </option>
          ))}
        </select>
      );
    case "switch":
      return (
        <input {...common} type="checkbox" checked={value === true} onChange={(event) => change(event.currentTarget.checked)} />
      );
    case "number":
      return (
        <span class="together">
          <NumberInput {...common} step={field.step ?? "any"} value={value} change={change} />
          {field.unit && <span>{field.unit}</span>}
        </span>
      );
    case "zone":
      return (
        <>
          <input {...common} type="text" list={`${id}-list`} value={String(value)} onInput={(event) => change(event.currentTarget.value)} />
          <datalist id={`${id}-list`}>
            {Intl.supportedValuesOf("timeZone").map((zone) => (
              <option key={zone} value={zone} />
            ))}
          </datalist>
        </>
      );
    case "hours":
      return <HoursEditor id={id} value={value as string[]} disabled={disabled} describedBy={describedBy} change={change} />;
    default:
      return (
        <input
          {...common}
          type="text"
          autocomplete="off"
          spellcheck={false}
          value={String(value)}
          onInput={(event) => change(event.currentTarget.value)}
        />
      );
  }
}

interface NumberProps {
  id: string;
  disabled: boolean;
  "aria-invalid": boolean;
  "aria-describedby": string;
  step: number | "any";
  value: Json;
  change(value: Json): void;
}

/** Keeps the text as it was typed while it means the same number: `1.0` is on the way to `1.05`. */
function NumberInput({ value, change, ...rest }: NumberProps) {
  const input = useRef<HTMLInputElement>(null);
  const typed = input.current;
  return (
    <input
      {...rest}
      ref={input}
      type="number"
      inputMode="decimal"
      min={0}
      value={typed && typed.valueAsNumber === value ? typed.value : String(value)}
      // Text that is not a number is sent as it is; the node's answer explains the error.
      onInput={({ currentTarget: { value: text, valueAsNumber: number } }) => change(Number.isNaN(number) ? text : number)}
    />
  );
}

/** The known choices, and the current value if it is not among them. */
function choices(field: Field, value: string): [string, string][] {
  const known = field.choices ?? [];
  return known.some(([one]) => one === value) ? known : [...known, [value, value]];
}
