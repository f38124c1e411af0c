/** A menu button with the keyboard behaviour of the ARIA pattern. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useId, useRef, useState } from "preact/hooks";

export interface Item {
  label: string;
  note?: string | undefined;
  run(): void;
}

export function Menu({ label, items, disabled }: { label: ComponentChildren; items: Item[]; disabled?: boolean }) {
  const [open, setOpen] = useState(false);
  const id = useId();
  const root = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const entries = () => [...(root.current?.querySelectorAll<HTMLButtonElement>("[role=menuitem]") ?? [])];

  // A layout effect runs before the next key event. A later effect could move the focus after the menu has closed.
  useLayoutEffect(() => {
    if (!open) return;
    entries()[0]?.focus();
    const outside = (event: PointerEvent) => {
      if (!root.current?.contains(event.target as Node)) setOpen(false);
    };
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, [open]);

  const close = () => {
    setOpen(false);
    button.current?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (!open) {
      if (event.key !== "ArrowDown") return;
      setOpen(true);
    } else if (event.key === "Escape") close();
    else if (event.key === "Tab") return setOpen(false);
    else if (!move(event.key, entries())) return;
    event.preventDefault();
  };

  return (
    <div class="menu" ref={root} onKeyDown={onKeyDown}>
      <button
        type="button"
        class="button"
        ref={button}
        aria-haspopup="menu"
        aria-expanded={open}
        aria-controls={open ? id : undefined}
        disabled={disabled}
        onClick={() => setOpen(!open)}
      >
        {label}
        <span class="caret" aria-hidden="true" />
      </button>
      {open && (
        <div role="menu" id={id} aria-label={typeof label === "string" ? label : undefined}>
          {items.map((item) => (
            <button
              type="button"
              role="menuitem"
              tabIndex={-1}
              key={item.label}
              onClick={() => {
                close();
                item.run();
              }}
            >
              {item.label}
              {item.note && <small>{item.note}</small>}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}

/** Moves the focus among `elements`; false if the key does not move it. */
export function move(key: string, elements: HTMLElement[], along: "y" | "x" = "y"): boolean {
  const at = elements.indexOf(document.activeElement as HTMLElement);
  const [back, on] = along === "y" ? ["ArrowUp", "ArrowDown"] : ["ArrowLeft", "ArrowRight"];
  const steps: Record<string, number> = { [back as string]: at - 1, [on as string]: at + 1, Home: 0, End: elements.length - 1 };
  const to = steps[key];
  if (to === undefined || !elements.length) return false;
  const wrapped = along === "y" ? (to + elements.length) % elements.length : Math.min(elements.length - 1, Math.max(0, to));
  elements[wrapped]?.focus();
  return true;
}
