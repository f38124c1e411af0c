"""Fixtures: one Chromium for the tests of a module, and a new profile for each test. Skips tests without Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.browser.harness import ARGUMENTS, CHROMIUM, WIDE, missing
from tests.swarm.conftest import figures, pytest_terminal_summary

__all__ = ["figures", "pytest_terminal_summary"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if lacks := missing():
        pytest.skip(lacks)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport=WIDE, color_scheme="light")
    context.set_default_timeout(75_000)
    yield context
    context.close()
