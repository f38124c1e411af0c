/** What the owner may change while the node runs, and what the node says about it. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { api, closeSession, Refused, sentence } from "../api/client";
import type { Config, Json } from "../api/types";
import { byKey, patch, sameValue, valueAt } from "../live/drafts";
import { reconnects, status } from "../live/store";
import { Section } from "../ui/text";
import { isRelay } from "../words/states";
import { clean } from "../words/clean";
import { About } from "./about";
import { Control } from "./control";
import { type Field, type Group, GROUPS } from "./fields";

export function Settings() {
  const config = useSignal<Config | null>(null);
  const fault = useSignal("");
  useEffect(() => {
    api.config().then(
      (found) => {
        config.value = found;
        fault.value = "";
      },
      (error: unknown) => {
        fault.value = sentence(error);
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
          <b>Note</b> These hold after pause and resume: {pending.join(", ")}.
        </p>
      )}
      {have && !have.changeable && (
        <p class="notice info">
          <b>Note</b> This node's version cannot change settings while it runs.
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
  config: Config;
  relay: boolean;
  changed(config: Config): void;
}

function GroupForm({ group, config, relay, changed }: GroupProps) {
  const drafts = useSignal<Record<string, Json>>({});
  const faults = useSignal<Record<string, string>>({});
  const said = useSignal("");
  const fields = group.fields.filter((field) => valueAt(config.config, field.key) !== undefined && !(relay && field.trains));
  if (!fields.length) return null;
  const keys = Object.keys(drafts.value);
  // What holds for all of them is said once.
  const later = fields.every((field) => config.changeable?.[field.key] === "restart");

  const save = async (changes: Record<string, Json>, words: string) => {
    said.value = "";
    try {
      changed(await api.change(patch(changes)));
      drafts.value = {};
      faults.value = {};
      said.value = words;
    } catch (error) {
      const named = error instanceof Refused ? byKey(error.faults, Object.keys(changes)) : {};
      faults.value = Object.keys(named).length ? named : { "": sentence(error) };
    }
  };
  const draft = (key: string, value: Json) => {
    const { [key]: _, ...rest } = drafts.value;
    drafts.value = sameValue(value, valueAt(config.config, key)) ? rest : { ...rest, [key]: value };
    said.value = "";
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
            giveBack={() => save({ [field.key]: null }, "Given back to the configuration.")}
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
            {said.value}
          </span>
        </p>
      </form>
    </Section>
  );
}

interface RowProps {
  field: Field;
  config: Config;
  /** That a change holds later is said for the whole group. */
  later: boolean;
  value: Json;
  fault: string;
  draft(value: Json): void;
  giveBack(): void;
}

const OWN = "settings page";
const LATER = "Holds after pause and resume.";

function Row({ field, config, later, value, fault, draft, giveBack }: RowProps) {
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
          {field.help} {config.changeable && !when && "Fixed while the node runs."}
          {when === "restart" && !later && LATER} {origin && origin !== "default" && `From: ${clean(origin)}.`}
          {origin === OWN && when && (
            <button type="button" class="text" onClick={giveBack}>
              Undo this choice<span class="unseen">: {field.label}</span>
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
