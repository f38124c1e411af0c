/** The form for the token, shown without a session. */

import { useEffect, useRef, useState } from "preact/hooks";
import { api, openSession, ApiError } from "../api/client";
import { unlock } from "../state/store";

function words(error: unknown): string {
  if (!(error instanceof ApiError)) return "The node does not answer. Is it running?";
  if (error.status === 429) return "Too many wrong tokens within a minute. The right token still opens this page.";
  if (error.status === 401) return "This token is wrong. The file api-token in the data folder contains it.";
  return error.message;
}

/** Whether the node recognises the browser after it has opened a session. */
function keepsCookie(): Promise<boolean> {
  return api.status().then(
    () => true,
    (error: unknown) => !(error instanceof ApiError && error.locked),
  );
}

export function Login() {
  const [token, setToken] = useState("");
  const [fault, setFault] = useState("");
  const [busy, setBusy] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);

  const submit = async (event: Event) => {
    event.preventDefault();
    // The user may paste the whole link that `run` prints.
    const link = /token=([^&\s]+)/.exec(token)?.[1];
    const given = link ? new URLSearchParams(`token=${link}`).get("token") ?? "" : token.trim();
    setBusy(true);
    setFault("");
    try {
      await openSession(given);
      if (await keepsCookie()) return unlock();
      setFault("The token is right, but the browser did not keep the cookie: allow cookies for this page.");
    } catch (error) {
      setFault(words(error));
      field.current?.select();
    }
    setBusy(false);
  };

  return (
    <form class="login" onSubmit={submit}>
      <h1 class="word" data-testid="state">
        Locked
      </h1>
      <p class="reason" data-testid="reason">
        Open the link that <code>diloco-node run</code> prints at start, or paste the token here. It is in the file{" "}
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
