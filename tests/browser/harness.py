"""Operates a node's page in a real Chromium. It finds elements by their roles, names and marks.

The page has these marks: `data-phase` on the root element (a phase, `locked` or `unknown`), and `data-testid` with the
values state, reason, stale, rounds and freshness.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, Dialog, Locator, Page, Request, ViewportSize

from node.api.page import STATIC
from tests.swarm.harness import Node

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
RESULTS = Path(__file__).parent / "results"
"""The folder for screenshots of the newest test run."""
ARGUMENTS = ("--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update")
VIEWS = ("Overview", "Swarm", "Logs", "Settings")
FILLED = {
    "Overview": ("h1", ".devices", ".charts canvas"),
    "Swarm": (
        "h1",
        "[role=option]",
        "[aria-labelledby=peers] tbody tr",
        "[aria-labelledby=contributions] tbody tr",
        ".charts canvas",
    ),
    "Logs": ("h1", ".log .line"),
    "Settings": ("h1", ".row", ".about dt"),
}
"""What each view shows after it has loaded all its data."""
WIDE, NARROW = ViewportSize(width=1280, height=900), ViewportSize(width=360, height=740)
WAIT_S = 150.0
LISTEN = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}`));
"""


def missing() -> str:
    """What this machine lacks to run the browser tests, with the remedy. Empty if it lacks nothing."""
    if not Path(CHROMIUM).exists():
        return f"no browser at {CHROMIUM}: install Debian's package chromium, or say where one is in CHROMIUM"
    if not (STATIC / "index.html").is_file():
        return "the dashboard is not built: make dashboard"
    if not AXE.is_file():
        return "axe-core is not there: npm ci in the folder dashboard"
    return ""


class Dashboard:
    """One browser tab that shows the page of one node."""

    def __init__(self, context: BrowserContext, node: Node) -> None:
        _ = node.http  # This waits for the node's address.
        self.node = node
        address = json.loads((node.folder / "api.json").read_text(encoding="utf-8"))
        self.url = str(address["url"])
        self.token = (node.folder / "api-token").read_text(encoding="utf-8").strip()
        self.page: Page = context.new_page()
        self.outside: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", self._requested)
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        self.page.on("dialog", self._dismiss)
        self.page.on("console", lambda said: self._said(said.type, said.text))
        self.page.add_init_script(LISTEN)

    def _requested(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.url:
            self.outside.append(request.url)

    def _dismiss(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _said(self, kind: str, text: str) -> None:
        if "Content Security Policy" in text or (kind == "error" and "Failed to load resource" not in text):
            self.faults.append(f"console: {text}")

    # navigation

    def open(self, *, with_token: bool = True) -> Dashboard:
        """Open the link that the `run` command prints, with or without the token."""
        self.page.goto(f"{self.url}/#token={self.token}" if with_token else f"{self.url}/")
        return self

    def view(self, name: str) -> Dashboard:
        self.page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
        self.page.get_by_role("link", name=name, exact=True).and_(self.page.locator("[aria-current=page]")).wait_for()
        return self

    def mark(self, name: str) -> Locator:
        return self.page.get_by_test_id(name)

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def item(self, name: str) -> Locator:
        return self.page.get_by_role("menuitem", name=name)

    @property
    def phase(self) -> str:
        return self.page.locator("html").get_attribute("data-phase") or ""

    def until_phase(self, phase: str, *, word: str = "", wait_s: float = WAIT_S) -> Dashboard:
        """Wait until the root element has the phase and the page shows `word`."""
        self.page.locator(f"html[data-phase={phase}]").wait_for(state="attached", timeout=1e3 * wait_s)
        if word:
            self.mark("state").filter(has_text=word).wait_for(timeout=1e3 * wait_s)
        return self

    def until_filled(self, view: str) -> Dashboard:
        """Wait until the view has loaded its data."""
        for mark in FILLED[view]:
            self.page.locator(f"main {mark}").first.wait_for()
        return self

    def until_stale(self, stale: bool, wait_s: float = WAIT_S) -> Dashboard:
        self.page.locator(f"html[data-stale={json.dumps(stale)}]").wait_for(state="attached", timeout=1e3 * wait_s)
        return self

    # checks

    def shoot(self, name: str) -> Path:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path

    def check(self) -> None:
        """Assert that all requests went to the node, the CSP was kept, and no exception was thrown."""
        assert self.outside == []
        assert self.page.evaluate("window.violations") == []
        assert self.faults == []

    def serious(self) -> list[str]:
        """The serious and critical findings of axe-core, with their places on the page."""
        if not self.page.evaluate("typeof axe !== 'undefined'"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = self.page.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)"
        )
        return [
            f"{one['impact']} {one['id']}: {one['help']} at {[node['target'] for node in one['nodes']][:4]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def overflow_px(self) -> int:
        """The number of pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def focused(self) -> str:
        """The role and the text of the focused element."""
        return str(
            self.page.evaluate(
                "(e => `${e.getAttribute('role') ?? e.tagName.toLowerCase()} ${e.innerText?.split('\\n')[0] ?? ''}`)"
                "(document.activeElement)"
            )
        )

    def tab_to(self, wanted: str, limit: int = 120) -> None:
        """Press Tab until the element has the focus."""
        seen = []
        for _ in range(limit):
            self.page.keyboard.press("Tab")
            seen.append(self.focused())
            if seen[-1] == wanted:
                return
        raise AssertionError(f"{wanted!r} is not reached by Tab: {seen}")
