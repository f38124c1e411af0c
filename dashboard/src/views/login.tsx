/** Without a session: the way in. */

import { useEffect, useRef, useState } from "preact/hooks";
import { openSession, Refused } from "../api/client";
import { unlock } from "../live/store";

function words(error: unknown): string {
  if (!(error instanceof Refused)) return "The node does not answer. Is it running?";
  if (error.status === 429) return "Too many wrong tokens within a minute. The right one opens this page all the same.";
  if (error.status === 401) return "This token is wrong. It is the one line in the file api-token of the data folder.";
  return error.message;
}

export function Login() {
  const [token, setToken] = useState("");
  const [fault, setFault] = useState("");
  const [busy, setBusy] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);

  const submit = async (event: Event) => {
    event.preventDefault();
    // What is pasted may be the whole link that `run` printed.
    const given = /token=([^&\s]+)/.exec(token)?.[1] ?? token.trim();
    setBusy(true);
    setFault("");
    try {
      await openSession(given);
      unlock();
    } catch (error) {
      setFault(words(error));
      setBusy(false);
      field.current?.select();
    }
  };

  return (
    <form class="login" onSubmit={submit}>
      <h1 class="word" data-testid="state">
        Locked
      </h1>
      <p class="reason" data-testid="reason">
        Open the link that <code>diloco-node run</code> printed at its start, or paste the token here. It is in the file{" "}
        <code>api-token</code> of the node's data folder.
      </p>
      <label for="token">Token</label>
      <div class="together">
        <input
          id="token"
          ref={field}
          type="password"
          autocomplete="current-password"
          spellcheck={false}
          required
          value={token}
          aria-invalid={fault !== ""}
          aria-describedby="token-fault"
          onInput={(event) => setToken(event.currentTarget.value)}
        />
        <button type="submit" class="button strong" disabled={busy}>
          Open
        </button>
      </div>
      <p class="fault" id="token-fault" role="alert">
        {fault}
      </p>
    </form>
  );
}
