/** Starts the page: token, theme, feed, application. */

import { computed } from "@preact/signals";
import { render } from "preact";
import { followLock, takeToken } from "./api/client";
import { App } from "./app";
import { startTheme } from "./components/theme";
import { setDrafts, watchDrafts } from "./state/drafts";
import { watchVisits } from "./state/visits";
import { startNotifications } from "./state/notifications";
import { start, status } from "./state/store";
import "./style/base.css";
import "./style/shell.css";
import "./style/overview.css";
import "./style/charts.css";
import "./style/swarm.css";
import "./style/forms.css";

takeToken();
followLock(() => {
  setDrafts({});
  location.reload();
});
startTheme();
watchDrafts(computed(() => status.value?.node.peer_id ?? ""));
watchVisits();
start();
startNotifications();
render(<App />, document.getElementById("app") as HTMLElement);
