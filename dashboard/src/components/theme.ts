/** The colour theme (light, dark or the system's), and its colours for canvas drawing. */

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
/** Increases when the colours change. */
export const colours = signal(0);

export function startTheme(): void {
  effect(() => {
    if (theme.value === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = theme.value;
    try {
      localStorage.setItem(KEY, theme.value);
    } catch {
      // Without storage the choice lasts until the page is closed.
    }
    colours.value = colours.peek() + 1;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours.value += 1;
  });
}

/** The current value of a custom colour property, in a form that a canvas accepts. */
export function resolve(property: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${property})`;
  probe.hidden = true;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
