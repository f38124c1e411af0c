/** The one string that brings others in. */

import { useState } from "preact/hooks";

export function Invite({ text }: { text: string }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      // Only there over HTTPS and on localhost.
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch {
      setSaid("Select the text and copy it");
    }
    setTimeout(() => setSaid(""), 3000);
  };
  return (
    <details class="invite">
      <summary>Invite</summary>
      <p class="together">
        <code tabIndex={0}>{text}</code>
        <button type="button" class="button" onClick={copy}>
          Copy
        </button>
      </p>
      <p class="quiet" role="status">
        {said}
      </p>
    </details>
  );
}
