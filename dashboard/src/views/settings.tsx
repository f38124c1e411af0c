/** The form for the settings that can change while the node runs. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api, closeSession, type Json, ApiError, errorText } from "../api/client";
import type { ResolvedConfig } from "../api/schema";
import { Section } from "../components/text";
import { clean } from "../format/sanitize";
import { isRelay } from "../format/status-text";
import { reconnects, status } from "../state/store";
import { About } from "./about";
import { Control } from "./control";
import { byKey, type Field, type Group, GROUPS, patch, sameValue, valueAt } from "./setting-fields";

export function Settings() {
  const config = useSignal<ResolvedConfig | null>(null);
  const fault = useSignal("");
  useEffect(() => {
    api.config().then(
      (found) => {
        config.value = found;
        fault.value = "";
      },
      (error: unknown) => {
        fault.value = errorText(error);
      },
    );
  }, [reconnects.value]);

  const have = config.value;
  const pending = have?.pending_restart ?? [];
  const relay = status.value !== null && isRelay(status.value);
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
      {have &&
        GROUPS.filter((group) => !(relay && group.trains)).map((group) => (
          <GroupForm
            key={group.id}
            group={group}
            config={have}
            relay={relay}
            changed={(next) => {
              config.value = next;
            }}
          />
        ))}
      {status.value && <About />}
      <Section title="This browser" id="browser">
        <button
          type="button"
          class="button"
          onClick={async () => {
            await closeSession().catch(() => undefined);
            location.reload();
          }}
        >
          Lock this page
        </button>
      </Section>
    </>
  );
}

interface GroupProps {
  group: Group;
  config: ResolvedConfig;
  relay: boolean;
  changed(config: ResolvedConfig): void;
}

function GroupForm({ group, config, relay, changed }: GroupProps) {
  const drafts = useSignal<Record<string, Json>>({});
  const faults = useSignal<Record<string, string>>({});
  const saveResult = useSignal("");
  const fields = group.fields.filter((field) => valueAt(config.config, field.key) !== undefined && !(relay && field.trains));
  if (!fields.length) return null;
  const keys = Object.keys(drafts.value);
  // If all fields take effect later, one note for the group says so.
  const later = fields.every((field) => config.changeable?.[field.key] === "restart");

  const save = async (changes: Record<string, Json>, words: string) => {
    saveResult.value = "";
    try {
      changed(await api.change(patch(changes)));
      drafts.value = {};
      faults.value = {};
      saveResult.value = words;
    } catch (error) {
      const named = error instanceof ApiError ? byKey(error.faults, Object.keys(changes)) : {};
      faults.value = Object.keys(named).length ? named : { "": errorText(error) };
    }
  };
  const draft = (key: string, value: Json) => {
    const { [key]: _, ...rest } = drafts.value;
    drafts.value = sameValue(value, valueAt(config.config, key)) ? rest : { ...rest, [key]: value };
    saveResult.value = "";
  };

  return (
    <Section title={group.title} id={`settings-${group.id}`} aside={later && <p class="quiet">{LATER}</p>}>
      <form
        class="settings"
        noValidate
        onSubmit={(event) => {
          event.preventDefault();
          if (keys.length) void save(drafts.value, "Saved.");
        }}
      >
        {fields.map((field) => (
          <Row
            key={field.key}
            field={field}
            config={config}
            later={later}
            value={drafts.value[field.key] ?? (valueAt(config.config, field.key) as Json)}
            fault={faults.value[field.key] ?? ""}
            draft={(value) => draft(field.key, value)}
            reset={() => save({ [field.key]: null }, "Reset to default.")}
          />
        ))}
        {faults.value[""] && (
          <p class="fault" role="alert">
            {clean(faults.value[""])}
          </p>
        )}
        <p class="together">
          {keys.length > 0 && (
            <>
              <button type="submit" class="button strong">
                Save
              </button>
              <button
                type="button"
                class="button"
                onClick={() => {
                  drafts.value = {};
                  faults.value = {};
                }}
              >
                Discard
              </button>
            </>
          )}
          <span class="quiet" role="status">
            {saveResult.value}
          </span>
        </p>
      </form>
    </Section>
  );
}

interface RowProps {
  field: Field;
  config: ResolvedConfig;
  /** Whether the group has one note about a later effect, so this row needs none. */
  later: boolean;
  value: Json;
  fault: string;
  draft(value: Json): void;
  reset(): void;
}

const OWN = "settings page";
const LATER = "Takes effect after pause and resume.";

function Row({ field, config, later, value, fault, draft, reset }: RowProps) {
  const id = `set-${field.key.replace(".", "-")}`;
  const when = config.changeable?.[field.key];
  const origin = config.origins[field.key];
  return (
    <div class="row" data-key={field.key}>
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
          {field.help} {!when && "Cannot change while the node runs."}
          {when === "restart" && !later && LATER} {origin && origin !== "default" && `From: ${clean(origin)}.`}
          {origin === OWN && when && (
            <button type="button" class="text" onClick={reset}>
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
