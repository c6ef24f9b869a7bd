"""A Chromium, and a system of simulated workers that its pages watch. The tests are plain functions: Playwright's
synchronous interface runs a loop of its own."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.watched import Watched
from tests.e2e.launcher import Launched, launched

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = "no Chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        # Without a sandbox, since the tests run as root in containers that allow none; the pages are our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="package")
def system(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A router, a scheduler, a simulated worker that is easily overloaded, and an autoscaler that may start another."""
    environment = {
        "HEADRACE_TIMING_SLOWDOWN": "30",
        "HEADRACE_MAX_SEQUENCES": "4",
        "HEADRACE_NUM_BLOCKS": "256",
        "HEADRACE_PERIOD_S": "1",
        "HEADRACE_TTFT_TARGET_S": "0.5",
    }
    scale = ("--sim", "--gpu", "h100", "--workers", "1", "--autoscale", "--min-workers", "1", "--max-workers", "2")
    with launched(tmp_path_factory.mktemp("watched"), *scale, environment=environment) as launched_system:
        yield launched_system


@pytest.fixture
def watched(browser: Browser, system: Launched) -> Iterator[Watched]:
    """The page, open and live; at the end it must have had nothing to complain of."""
    with Watched.opened(browser, system.url) as page:
        yield page
        page.assert_quiet()
