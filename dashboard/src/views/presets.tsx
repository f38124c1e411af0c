/** Three sets of limits. Choosing one changes the drafts; nothing is saved before the user says so. */

import type { Json } from "../api/client";
import { Section } from "../components/text";
import { PRESETS, presetOf, presetValues } from "./setting-fields";

interface Props {
  cores: number;
  /** The value of a key with the drafts. */
  value(key: string): Json | undefined;
  choose(values: Record<string, Json>): void;
}

export function Presets({ cores, value, choose }: Props) {
  const chosen = presetOf(cores, value);
  return (
    <Section title="How much" id="settings-presets">
      <fieldset class="presets">
        <legend class="unseen">How much of this machine the node may use</legend>
        {PRESETS.map((preset) => (
          <label key={preset.id}>
            <input
              type="radio"
              name="preset"
              checked={chosen === preset.id}
              onChange={() => choose(presetValues(preset, cores))}
            />
            <span>
              <b>{preset.label}</b>
              <small>{preset.text(cores)}</small>
            </span>
          </label>
        ))}
      </fieldset>
      {chosen === null && <p class="quiet">The limits below are your own.</p>}
    </Section>
  );
}
