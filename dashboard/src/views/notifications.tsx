/** The switch for browser notifications. */

import { enable, enabled, permission } from "../state/notifications";

const NOTES = {
  unsupported: "This browser allows notifications only over HTTPS or on localhost.",
  denied: "Notifications of this page are blocked. Allow them in the browser's settings for this site.",
  default: "The browser asks for your permission.",
  granted: "",
};

export function Notifications() {
  const state = permission.value;
  return (
    <div class="notify">
      <label class="check">
        <input
          type="checkbox"
          checked={enabled.value}
          disabled={state === "unsupported" || state === "denied"}
          aria-describedby="notify-help"
          onChange={(event) => {
            const box = event.currentTarget;
            void enable(box.checked).then(() => {
              box.checked = enabled.value;
            });
          }}
        />
        <span>Notify me in this browser when the node needs me</span>
      </label>
      <p class="quiet" id="notify-help">
        After an error, with a full disk, when nobody reaches the node, when it does not answer, and when there is a newer version. This page must stay open in a tab.{" "}
        {NOTES[state]}
      </p>
    </div>
  );
}
