/** The page's start: token, theme, live feed, application. */

import { render } from "preact";
import { takeToken } from "./api/client";
import { App } from "./app";
import { start } from "./live/store";
import { startTheme } from "./ui/theme";
import "./style/base.css";
import "./style/shell.css";
import "./style/overview.css";
import "./style/charts.css";
import "./style/swarm.css";
import "./style/forms.css";

takeToken();
startTheme();
start();
render(<App />, document.getElementById("app") as HTMLElement);
