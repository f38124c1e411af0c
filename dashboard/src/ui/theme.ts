/** Light, dark, or as the system has it; and what colours mean on a canvas, which knows no style sheet. */

import { effect, signal } from "@preact/signals";

export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
const KEY = "diloco-theme";

function stored(): Theme {
  try {
    const found = localStorage.getItem(KEY) as Theme;
    return THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

export const theme = signal<Theme>(stored());
/** Grows whenever colours change, by the switch here or by the system's. */
export const colours = signal(0);

export function startTheme(): void {
  effect(() => {
    if (theme.value === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = theme.value;
    try {
      localStorage.setItem(KEY, theme.value);
    } catch {
      // Then the choice lasts as long as the page.
    }
    colours.value = colours.peek() + 1;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours.value += 1;
  });
}

/** The colour that a custom property comes to at this moment, in a form that a canvas takes. */
export function resolve(property: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${property})`;
  probe.hidden = true;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
