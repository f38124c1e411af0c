/** The frame of the page: navigation, connection state, announcements for screen readers. */

import { signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { takeToken } from "./api/client";
import { OpenTip } from "./components/term";
import { Name } from "./components/text";
import { theme, THEMES } from "./components/theme";
import { brief } from "./format/format";
import { reason } from "./format/status-text";
import { drafts } from "./state/drafts";
import { ageS, link, OFFLINE, now, stale, status, unlock, word } from "./state/store";
import { Login } from "./views/login";
import { Logs } from "./views/logs";
import { Overview } from "./views/overview";
import { Settings } from "./views/settings";
import { Swarm } from "./views/swarm";

const VIEWS: { id: string; label: string; view: ComponentType }[] = [
  { id: "overview", label: "Overview", view: Overview },
  { id: "swarm", label: "Swarm", view: Swarm },
  { id: "logs", label: "Logs", view: Logs },
  { id: "settings", label: "Settings", view: Settings },
];

const here = () => VIEWS.find((view) => `#/${view.id}` === location.hash)?.id ?? "overview";
const route = signal(here());
addEventListener("hashchange", () => {
  // Somebody has opened the link that `run` prints in this tab.
  if (takeToken()) unlock();
  // The target of the skip link is not a view.
  if (location.hash === "" || location.hash.startsWith("#/")) route.value = here();
});

export function App() {
  const locked = link.value === "locked";
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  useEffect(() => {
    // A new view starts at its top and takes the keyboard focus.
    if (!first.current) {
      main.current?.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    first.current = false;
  }, [route.value]);
  const View = VIEWS.find((view) => view.id === route.value)?.view ?? Overview;
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          main.current?.focus();
        }}
      >
        Skip to content
      </a>
      <Header locked={locked} />
      <main id="main" ref={main} tabIndex={-1} class={stale.value ? "stale" : undefined}>
        {locked ? <Login /> : <View />}
      </main>
      <Announcer />
      <OpenTip />
    </>
  );
}

function Header({ locked }: { locked: boolean }) {
  const node = status.value?.node;
  return (
    <header class="top">
      <div class="identity">
        <span class="lamp" aria-hidden="true" />
        {node?.name ? <Name text={node.name} most={40} /> : <span class="name">diloco-node</span>}
      </div>
      {!locked && (
        <nav aria-label="Views">
          {VIEWS.map(({ id, label }) => (
            <a key={id} href={`#/${id}`} aria-current={route.value === id ? "page" : undefined}>
              {label}
              {id === "settings" && Object.keys(drafts.value).length > 0 && (
                <span class="unsaved">
                  <span class="unseen">not saved</span>
                </span>
              )}
            </a>
          ))}
        </nav>
      )}
      {node && route.value !== "overview" && !locked && <span class="now">{word.value}</span>}
      <Freshness />
      <ThemeSwitch />
    </header>
  );
}

/** Whether the data is live, and its age if it is not. */
function Freshness() {
  const words =
    link.value === "locked" ? ""
    : stale.value ? (status.value?.final ? "Ended" : `${brief(ageS.value)} old`)
    : status.value === null || link.value === "opening" ? "…" : "Live";
  const how = link.value === "polling" ? "The event stream is not available, so this page polls the node every 5 seconds." : undefined;
  return (
    <span class={stale.value && !status.value?.final ? "freshness old" : "freshness"} title={how} data-testid="freshness" data-link={link.value}>
      {words}
    </span>
  );
}

function ThemeSwitch() {
  return (
    <fieldset class="theme">
      <legend class="unseen">Colours</legend>
      {THEMES.map((name) => (
        <label key={name} title={{ auto: "Same as the system", light: "Light", dark: "Dark" }[name]}>
          <input
            type="radio"
            name="theme"
            class="unseen"
            checked={theme.value === name}
            onChange={() => {
              theme.value = name;
            }}
          />
          <span>{{ auto: "Auto", light: "Light", dark: "Dark" }[name]}</span>
        </label>
      ))}
    </fieldset>
  );
}

/** Announces a new state to screen readers once, not every changed number. */
function Announcer() {
  const said = useRef({ key: "", text: "" });
  const key = word.value;
  if (status.value && said.current.key !== key) {
    const text = word.value === OFFLINE ? "Offline. The node does not answer." : `${key}. ${reason(status.value, now.peek())}`;
    said.current = { key, text };
  }
  return (
    <p class="unseen" role="status" aria-live="polite">
      {said.current.text}
    </p>
  );
}
