/** The form for the settings that can change while the node runs. */

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { api, closeSession, type Json, ApiError, errorText } from "../api/client";
import type { ResolvedConfig } from "../api/schema";
import { Section } from "../components/text";
import { clean } from "../format/sanitize";
import { isRelay } from "../format/status-text";
import { zoneNote } from "../format/weekly-hours";
import { drafts, setDrafts } from "../state/drafts";
import { reconnects, status, visible } from "../state/store";
import { About } from "./about";
import { Control } from "./control";
import { Notifications } from "./notifications";
import { Presets } from "./presets";
import { ADVANCED, byKey, type Field, type Group, GROUPS, patch, sameValue, valueAt } from "./setting-fields";

const FORM = "settings";

export function Settings() {
  const config = useSignal<ResolvedConfig | null>(null);
  const fault = useSignal("");
  const faults = useSignal<Record<string, string>>({});
  const result = useSignal("");
  const lockFault = useSignal("");
  const advanced = useRef<HTMLDetailsElement>(null);
  const node = status.value;
  // Another tab or program may have changed the configuration.
  useEffect(() => {
    api.config().then(
      (found) => {
        config.value = found;
        fault.value = "";
        // Another tab may have saved the same values.
        const open = Object.entries(drafts.peek()).filter(([key, value]) => !sameValue(value, valueAt(found.config, key)));
        if (open.length < Object.keys(drafts.peek()).length) setDrafts(Object.fromEntries(open));
      },
      (error: unknown) => {
        fault.value = errorText(error);
      },
    );
  }, [reconnects.value, visible.value, JSON.stringify(node?.limits), node?.node.name, node?.phase]);

  const have = config.value;
  const pending = have?.pending_restart ?? [];
  const relay = node !== null && isRelay(node);
  const current = (key: string) => (have ? (valueAt(have.config, key) as Json | undefined) : undefined);
  const change = (values: Record<string, Json>) => {
    const next = { ...drafts.value };
    for (const [key, value] of Object.entries(values)) {
      if (current(key) === undefined) continue;
      if (sameValue(value, current(key))) delete next[key];
      else next[key] = value;
    }
    setDrafts(next);
    faults.value = Object.fromEntries(Object.entries(faults.value).filter(([key]) => !(key in values)));
    result.value = "";
  };
  const save = async (changes: Record<string, Json>, words: string) => {
    result.value = "";
    try {
      config.value = await api.change(patch(changes));
      // The user may have typed on meanwhile.
      const left = Object.entries(drafts.value).filter(([key, value]) => !(key in changes) || !sameValue(value, changes[key]));
      setDrafts(Object.fromEntries(left));
      faults.value = {};
      result.value = words;
    } catch (error) {
      const named = error instanceof ApiError ? byKey(error.faults, Object.keys(changes)) : {};
      faults.value = Object.keys(named).length ? named : { "": errorText(error) };
    }
  };
  const groups = (all: Group[]) =>
    have &&
    all.map((group) => (
      <GroupRows
        key={group.id}
        group={group}
        config={have}
        relay={relay}
        faults={faults.value}
        draft={(key, value) => change({ [key]: value })}
        reset={(key) => save({ [key]: null }, "Reset to default.")}
      />
    ));
  const isFaulty = ADVANCED.some((group) => group.fields.some((field) => faults.value[field.key]));
  useEffect(() => {
    if (isFaulty && advanced.current) advanced.current.open = true;
  }, [isFaulty]);
  const lock = async () => {
    lockFault.value = "";
    try {
      await closeSession();
    } catch (error) {
      lockFault.value = `This page is not locked. ${errorText(error)}`;
    }
  };
  return (
    <>
      <h1 class="title">Settings</h1>
      {fault.value && (
        <p class="notice error" role="alert">
          {fault.value}
        </p>
      )}
      {pending.length > 0 && (
        <p class="notice info" role="status">
          <b>Note</b> These changes take effect after pause and resume: {pending.join(", ")}.
        </p>
      )}
      {have && !relay && <Presets cores={have.cores} value={(key) => drafts.value[key] ?? current(key)} choose={change} />}
      <form
        id={FORM}
        noValidate
        onSubmit={(event) => {
          event.preventDefault();
          if (Object.keys(drafts.value).length) void save(drafts.value, "Saved.");
        }}
      >
        {groups(GROUPS)}
        {have && (
          <details class="advanced" ref={advanced}>
            <summary>Advanced</summary>
            {groups(ADVANCED)}
          </details>
        )}
      </form>
      {node && <About />}
      <Section title="This browser" id="browser">
        <Notifications />
        <button type="button" class="button" onClick={() => void lock()}>
          Lock this page
        </button>
        <p class="fault" role="alert">
          {lockFault.value}
        </p>
      </Section>
      <SaveBar
        fault={faults.value[""] ?? ""}
        result={result.value}
        discard={() => {
          setDrafts({});
          faults.value = {};
        }}
      />
    </>
  );
}

/** One bar for all changes. It stays at the lower edge of the window. */
function SaveBar({ fault, result, discard }: { fault: string; result: string; discard(): void }) {
  const changes = Object.keys(drafts.value).length;
  const bar = useRef<HTMLDivElement>(null);
  const hadChanges = useRef(false);
  // The buttons disappear with the changes, so the bar takes the keyboard focus.
  useLayoutEffect(() => {
    if (!changes && hadChanges.current && document.activeElement === document.body) bar.current?.focus();
    hadChanges.current = changes > 0;
  }, [changes]);
  return (
    <div class={changes || fault ? "save open" : "save"} data-testid="save" ref={bar} tabIndex={-1}>
      {changes > 0 && (
        <>
          <span>{changes === 1 ? "1 unsaved change" : `${changes} unsaved changes`}</span>
          <button type="button" class="button" onClick={discard}>
            Discard
          </button>
          <button type="submit" form={FORM} class="button strong">
            Save
          </button>
        </>
      )}
      <span class="fault" role="alert">
        {clean(fault)}
      </span>
      <span class="quiet" role="status">
        {result}
      </span>
    </div>
  );
}

interface GroupProps {
  group: Group;
  config: ResolvedConfig;
  relay: boolean;
  faults: Record<string, string>;
  draft(key: string, value: Json): void;
  reset(key: string): void;
}

function GroupRows({ group, config, relay, faults, draft, reset }: GroupProps) {
  const fields = group.fields.filter((field) => valueAt(config.config, field.key) !== undefined && !(relay && field.trains));
  if (!fields.length || (relay && group.trains)) return null;
  // If all fields take effect later, one note for the group says so.
  const later = fields.every((field) => config.changeable[field.key] === "restart");
  return (
    <Section title={group.title} id={`settings-${group.id}`} aside={later && <p class="quiet">{LATER}</p>}>
      <div class="settings">
        {fields.map((field) => (
          <Row
            key={field.key}
            field={field}
            config={config}
            later={later}
            value={drafts.value[field.key] ?? (valueAt(config.config, field.key) as Json)}
            isDraft={field.key in drafts.value}
            fault={faults[field.key] ?? ""}
            draft={(value) => draft(field.key, value)}
            reset={() => reset(field.key)}
          />
        ))}
      </div>
    </Section>
  );
}

interface RowProps {
  field: Field;
  config: ResolvedConfig;
  /** Whether the group has one note about a later effect, so this row needs none. */
  later: boolean;
  value: Json;
  isDraft: boolean;
  fault: string;
  draft(value: Json): void;
  reset(): void;
}

const BROWSER_ZONE = new Intl.DateTimeFormat().resolvedOptions().timeZone;
const OWN = "settings page";
const LATER = "Takes effect after pause and resume.";

function Row({ field, config, later, value, isDraft, fault, draft, reset }: RowProps) {
  const id = `set-${field.key.replace(".", "-")}`;
  const when = config.changeable[field.key];
  const origin = config.origins[field.key];
  return (
    <div class={isDraft ? "row draft" : "row"} data-key={field.key}>
      <label for={id} id={`${id}-label`}>
        {field.label}
      </label>
      <div>
        <Control
          field={field}
          id={id}
          value={value}
          disabled={!when}
          invalid={fault !== ""}
          describedBy={`${id}-help ${id}-fault`}
          change={draft}
        />
        <p class="quiet" id={`${id}-help`}>
          {field.help} {field.kind === "hours" && zoneNote(config.timezone, BROWSER_ZONE)} {!when && "Cannot change while the node runs."}
          {when === "restart" && !later && LATER} {origin && origin !== "default" && origin !== OWN && `From: ${clean(origin)}.`}
          {origin === OWN && when && (
            <button
              type="button"
              class="text"
              onClick={() => {
                // The button disappears, so the field takes the keyboard focus.
                document.getElementById(id)?.focus();
                reset();
              }}
            >
              Reset to default<span class="unseen">: {field.label}</span>
            </button>
          )}
        </p>
        <p class="fault" id={`${id}-fault`} role="alert">
          {clean(fault)}
        </p>
      </div>
    </div>
  );
}
