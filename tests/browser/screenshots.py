"""Takes the pictures of the live page that docs/ holds.

python -m tests.browser.screenshots docs
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.watched import Watched
from tests.e2e.launcher import Launched, launched

ENVIRONMENT = {
    "HEADRACE_TIMING_SLOWDOWN": "12",
    "HEADRACE_MAX_SEQUENCES": "12",
    "HEADRACE_NUM_BLOCKS": "160",
    "HEADRACE_PERIOD_S": "2",
    "HEADRACE_TTFT_TARGET_S": "1",
}
WIDE = {"viewport": {"width": 1360, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "device_scale_factor": 2}


def main(folder: Path) -> None:
    path = shutil.which("chromium")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as data:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        scale = ("--sim", "--workers", "2", "--autoscale", "--min-workers", "2", "--max-workers", "4")
        with launched(Path(data), *scale, environment=ENVIRONMENT) as system:
            flooded(browser, system, folder)
        browser.close()


def flooded(browser: Browser, system: Launched, folder: Path) -> None:
    with Watched.opened(browser, system.url, **WIDE, color_scheme="light") as watched:
        page = watched.page
        page.wait_for_timeout(4000)
        for rate, seconds, wait_ms in (("15", "8", 11_000), ("36", "60", 15_000)):
            page.locator("#rate").fill(rate)
            page.locator("#seconds").fill(seconds)
            page.locator("#start").click()
            page.wait_for_timeout(wait_ms)
        page.locator("#refresh").click()
        page.wait_for_timeout(500)
        page.locator("#request-list tr", has_text="finished").first.locator("button").click()
        page.wait_for_selector(".waterfall", timeout=30_000)
        page.wait_for_timeout(300)
        shoot(page, folder / "dashboard-light.png")
        take(browser, system, folder / "dashboard-dark.png", {**WIDE, "color_scheme": "dark"})
        take(browser, system, folder / "dashboard-phone.png", PHONE)
        page.locator("#stop").click()


def take(browser: Browser, system: Launched, path: Path, options: dict[str, Any]) -> None:
    with Watched.opened(browser, system.url, **options) as watched:
        watched.page.wait_for_timeout(2500)
        shoot(watched.page, path)


def shoot(page: Page, path: Path) -> None:
    # A header that stays in sight would stand in the middle of a picture of the whole page.
    page.evaluate("document.querySelector('.top').style.position = 'static'")
    page.screenshot(path=path, full_page=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
