"""A real browser for the tests of pages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60.0  # seconds: where tests run side by side, a browser may have to wait
WIDE, PHONE = (1200, 900), (390, 844)


@contextmanager
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser to test pages in: none of {', '.join(NAMES)} is installed")
    sync = pytest.importorskip("playwright.sync_api", reason="no playwright to test pages with")
    with sync.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


class Reader:
    """Somebody with one page open, and what that page said and asked for.

    Attributes:
        page: Playwright's.
        asked: addresses of all requests, but for what is inside the page.
        said: messages on its console, and errors.
    """

    def __init__(
        self, chromium: Browser, address: str, size: tuple[int, int] = WIDE, before: str = "", **options: Any
    ) -> None:
        context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        context.add_init_script(before)
        self.page: Page = context.new_page()
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(address)

    def _request(self, request: object) -> None:
        address: str = request.url  # type: ignore[attr-defined]
        if not address.startswith(("data:", "blob:")):
            self.asked.append(address)

    def drawn(self, chart: str) -> int:
        """Scrolls there, and says how many lines and clouds of points there are."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#{chart}[data-drawn]", state="attached")
        return self.traces(chart)

    def traces(self, chart: str) -> int:
        return self.page.locator(f"#{chart} .scatterlayer > .trace").count()

    def wait_for(self, condition: str) -> None:
        """Until JavaScript finds it true. Playwright's own way is one that the page forbids."""
        end = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not so: {condition}"
            self.page.wait_for_timeout(50)

    def charts(self) -> list[str]:
        found: list[str] = self.page.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.id)")
        return found
