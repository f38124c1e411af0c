/** What the model says: its newest sample, and a box in which the owner tries it while it learns. */

import { signal } from "@preact/signals";
import { api, errorText } from "../api/client";
import type { GeneratedText } from "../api/schema";
import { Section } from "../components/text";
import { clean } from "../format/sanitize";
import { status } from "../state/store";
import { ownRun } from "./run-card";

const LONGEST_PROMPT = 2000;
const TOKENS = 64;
const TEMPERATURE = 0.8;

// They outlive a change of view, because an answer takes up to some minutes.
const prompt = signal("");
const answer = signal<{ prompt: string; found: GeneratedText } | null>(null);
const problem = signal("");
const busy = signal(false);

export function TryModel() {
  async function ask(event: Event): Promise<void> {
    event.preventDefault();
    const text = prompt.value;
    if (busy.value || !text) return;
    busy.value = true;
    problem.value = "";
    try {
      answer.value = { prompt: text, found: await api.generate({ prompt: text, tokens: TOKENS, temperature: TEMPERATURE }) };
    } catch (error) {
      problem.value = errorText(error);
    } finally {
      busy.value = false;
    }
  }

  return (
    <Section title="Try the model" id="try">
      <form class="try" onSubmit={(event) => void ask(event)}>
        <label for="try-prompt">The model continues this text</label>
        <textarea
          id="try-prompt"
          rows={3}
          maxLength={LONGEST_PROMPT}
          placeholder="Write how a text begins, then press Continue."
          value={prompt.value}
          onInput={(event) => (prompt.value = event.currentTarget.value)}
        />
        <p>
          {/* A disabled button would lose the keyboard focus. */}
          <button type="submit" class="button" disabled={!prompt.value} aria-disabled={busy.value}>
            {busy.value ? "The model is loading" : "Continue"}
          </button>{" "}
          <span class="quiet">Uses the newest checkpoint. It takes some seconds, and training has priority.</span>
        </p>
      </form>
      <div aria-live="polite">
        {problem.value && <p class="problem">{problem.value}</p>}
        {answer.value && <Text {...answer.value.found} prompt={answer.value.prompt} />}
      </div>
      {!answer.value && <NewestSample />}
    </Section>
  );
}

/** The text that the model wrote at its newest evaluation. */
function NewestSample() {
  const fromWorker = status.value?.training?.samples ?? [];
  const kept = (ownRun.value?.run.samples ?? []).map(({ number: round, ...sample }) => ({ round, ...sample }));
  const newest = [...kept, ...fromWorker].reduce<Sample | null>((a, b) => (a && a.round > b.round ? a : b), null);
  return newest && <Text {...newest} />;
}

interface Sample {
  prompt: string;
  text: string;
  round: number;
}

function Text({ prompt, text, round }: Sample) {
  return (
    <figure data-testid="answer">
      <pre>
        <b>{clean(prompt)}</b>
        {clean(text)}
      </pre>
      <figcaption class="quiet">The bold text was given. The model wrote the rest after round {round}. Nobody has checked it.</figcaption>
    </figure>
  );
}
