"""The live page in a browser, and what it complained of."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from playwright.sync_api import Browser, Page, expect

PATIENCE_MS = 90_000
VIOLATIONS = """
window.violations = [];
document.addEventListener(
  "securitypolicyviolation", (event) => window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


class Watched:
    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.may_lose_connection = False
        """A router that is away shows in the console as failed requests."""
        self._complaints: list[str] = []
        self._strangers: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.add_init_script(VIOLATIONS)
        page.on("console", lambda message: self._complain(message.type, message.text))
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", lambda request: self._on_request(request.url))

    @classmethod
    @contextlib.contextmanager
    def opened(cls, browser: Browser, url: str, **options: Any) -> "Iterator[Watched]":
        """`options` of the browser's context: size, colours, motion."""
        context = browser.new_context(**options)
        try:
            watched = cls(context.new_page(), url)
            watched.page.goto(f"{url}/dashboard")
            watched.wait_live()
            yield watched
        finally:
            context.close()

    def wait_live(self) -> None:
        expect(self.page.locator("#link")).to_have_text("live", timeout=PATIENCE_MS)
        expect(self.page.locator("#clock")).not_to_be_empty(timeout=PATIENCE_MS)

    def figure(self, name: str, within: str = "#totals") -> float:
        """A number on the page; NaN where it shows none."""
        text = self.page.locator(f'{within} dd[data-figure="{name}"]').inner_text()
        number = re.match(r"[\d.,]+", text)
        return float(number.group().replace(",", "")) if number else float("nan")

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_MS / 1000) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            self.page.wait_for_timeout(100)

    def assert_quiet(self) -> None:
        violations = self.page.evaluate("window.violations")
        assert not violations, f"content security policy: {violations}"
        assert not self._complaints, self._complaints
        assert not self._strangers, f"the page asked others: {self._strangers}"

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not (self.may_lose_connection and "net::ERR_" in text):
            self._complaints.append(text)

    def _on_request(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self._strangers.append(url)
