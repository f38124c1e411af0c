// Shows the node's phase. The token comes in the fragment, is traded for a cookie at once, and leaves the address bar.
"use strict";

const INTERVAL_MS = 2000;
const byId = (id) => document.getElementById(id);

async function openSession() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  await fetch("/api/v1/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
}

function facts(status) {
  const { run, training, peers, contribution } = status;
  const loss = training.loss === null ? "none yet" : training.loss.toFixed(3);
  return [
    ["Name", status.node.name || "none yet"],
    ["Round", run.round < 0 ? "none yet" : String(run.round)],
    ["Inner step", `${training.inner_step} of ${training.inner_steps}`],
    ["Loss", loss],
    ["Tokens per second", Math.round(training.tokens_per_second).toLocaleString()],
    ["Peers that train", String(peers.training)],
    ["Reachable from outside", status.reachability_reason || status.reachability],
    ["Rounds joined", String(contribution.rounds_joined)],
    ["Invite", run.invite || "none yet"],
  ];
}

function show(phase, reason, rows) {
  byId("phase").textContent = phase;
  byId("reason").textContent = reason;
  const parts = rows.flatMap(([name, value]) => {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    return [dt, dd];
  });
  byId("facts").replaceChildren(...parts);
}

async function poll() {
  try {
    const answer = await fetch("/api/v1/status", { signal: AbortSignal.timeout(10000) });
    if (answer.status === 401) {
      show("Locked.", "Open the address that diloco-node printed at its start: it carries the token.", []);
    } else if (!answer.ok) {
      show("The node cannot answer.", `HTTP ${answer.status}`, []);
    } else {
      const status = await answer.json();
      show(status.phase, status.reason, facts(status));
    }
  } catch {
    show("The node does not answer.", "It may have stopped.", []);
  }
  setTimeout(poll, INTERVAL_MS);
}

openSession().catch(() => undefined).then(poll);
