"""The live page as a person has it: figures, flood, replay, requests, keyboard, phone."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
from playwright.sync_api import Browser, Route, expect

from tests.browser.watched import Watched
from tests.e2e.launcher import Launched

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@contextlib.contextmanager
def answers_open(system: Launched, count: int, num_tokens: int) -> Iterator[None]:
    """So many answers are being written meanwhile."""
    model = httpx.get(f"{system.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "a river", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    has_ended = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{system.url}/v1/completions", json=body, timeout=60) as response:
            for _ in response.iter_lines():
                if has_ended.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def metric(url: str, name: str) -> float:
    """The sum over all label sets."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{|\s)", line))


def test_figures_on_the_page_are_those_of_metrics(watched: Watched, system: Launched) -> None:
    worker = f"http://127.0.0.1:{system.processes('worker')[0]['health_port']}"
    with answers_open(system, 3, 4000):

        def agree() -> bool:
            page = (watched.figure("in_flight"), watched.page.locator(".worker .figure").first.inner_text())
            held, blocks = metric(worker, "headrace_blocks_referenced"), metric(worker, "headrace_blocks")
            # A block is granted every few tenths of a second, and both are read at moments of their own.
            shown = re.match(r"([\d,]+) of ([\d,]+) KV blocks", page[1])
            assert shown is not None, page[1]
            numbers = [int(each.replace(",", "")) for each in shown.groups()]
            in_flight = metric(system.url, "headrace_requests_inflight")
            return page[0] == in_flight == 3 and numbers[1] == blocks and held > 0 and abs(numbers[0] - held) <= 12

        watched.until(agree, "the page and /metrics agree")
        watched.until(lambda: watched.figure("tokens") > 0, "tokens a second")
        watched.until(lambda: watched.figure("running", '[data-box="scheduler"]') == 3, "the scheduler runs them")
    watched.until(lambda: watched.figure("in_flight") == 0, "nothing is open any more")


def test_a_flood_raises_the_queue_and_then_the_number_of_workers(watched: Watched) -> None:
    page = watched.page
    page.locator("#rate").fill("40")
    page.locator("#seconds").fill("60")
    assert page.locator("#rate-shown").inner_text() == "16"
    page.locator("#start").click()
    watched.until(lambda: watched.figure("queue") >= 10, "the queue rises")
    expect(page.locator(".dots i.on").nth(8)).to_be_attached()
    watched.until(lambda: watched.figure("ready") == 2, "a second worker is ready")
    watched.until(lambda: page.locator(".worker").count() == 2, "its card")
    assert watched.figure("due", "#flood-figures") > 20 and watched.figure("tokens", "#flood-figures") >= 0
    assert page.locator("#tradeoff circle").count() > 0
    page.locator("#stop").click()
    expect(page.locator("#flood-state")).to_have_text("stopped")
    watched.until(lambda: watched.figure("queue") == 0, "the queue is empty again")


def test_a_requests_life_is_told_from_the_flight_recording(watched: Watched, system: Launched) -> None:
    page = watched.page
    model = httpx.get(f"{system.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "a mill", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=60).json()
    page.wait_for_timeout(1500)  # recordings are sent once a second
    page.locator("#find-id").fill(answer["id"])
    page.locator("#find-id").press("Enter")
    expect(page.locator(".waterfall code")).to_have_text(answer["id"].removeprefix("cmpl-"))
    names = page.locator(".bars .name").all_inner_texts()
    assert names[0] == "received" and any(name.startswith("prefill worker-") for name in names), names
    assert any(name.startswith("decode worker-") for name in names), names
    page.locator(".waterfall summary").click()
    expect(page.locator(".waterfall details")).to_contain_text("placed on worker-")
    assert "a mill" not in page.content()


def test_a_restarted_router_is_found_again_and_the_past_is_kept(watched: Watched, system: Launched) -> None:
    page = watched.page
    watched.may_lose_connection = True
    kept = page.evaluate("Number(document.getElementById('at').max)")
    before = system.pid("router")
    os.kill(before, signal.SIGKILL)
    expect(page.locator("#link")).to_have_text(re.compile("connecting|reconnecting"))
    watched.wait_live()
    watched.until(lambda: watched.figure("ready") >= 1, "workers are seen again")
    assert system.pid("router") != before
    assert page.evaluate("Number(document.getElementById('at').max)") >= kept


def test_everything_can_be_done_with_the_keyboard(watched: Watched) -> None:
    page = watched.page

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.className"))

    page.keyboard.press("Tab")
    assert focused() == "skip"
    wanted = {
        "theme",
        "play",
        "at",
        "speed",
        "find-id",
        "refresh",
        "rate",
        "tokens",
        "words",
        "seconds",
        "start",
        "box",
    }
    reached: set[str] = set()
    for _ in range(250):  # each listed request is a stop
        if wanted <= reached:
            break
        page.keyboard.press("Tab")
        reached.add(focused())
    assert wanted <= reached, wanted - reached
    watched.until(lambda: page.evaluate("Number(document.getElementById('at').max)") > 2, "some past")
    page.locator("#at").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("body")).to_have_class("past")
    expect(page.locator("#shown")).not_to_have_text("now")
    page.locator("#live").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#shown")).to_have_text("now")
    page.locator("#theme").focus()
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") != theme


def test_the_past_is_replayed_frame_by_frame(watched: Watched) -> None:
    page = watched.page
    watched.until(lambda: page.evaluate("Number(document.getElementById('at').max)") > 4, "some past")
    clock = page.locator("#clock").inner_text()
    page.locator("#at").fill("0")
    expect(page.locator("#clock")).not_to_have_text(clock)
    first = page.locator("#clock").inner_text()
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#clock")).not_to_have_text(first)
    page.locator("#play").click()
    page.locator("#live").click()
    expect(page.locator("#shown")).to_have_text("now")


def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Browser, system: Launched) -> None:
    with Watched.opened(browser, system.url, **PHONE) as watched:
        widths = watched.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1], widths
        boxes = watched.page.locator(".box").evaluate_all(
            "boxes => boxes.map(box => box.getBoundingClientRect().width)"
        )
        assert len(boxes) == 7 and all(300 < width <= 390 for width in boxes), boxes
        watched.assert_quiet()


def test_nothing_moves_for_those_who_want_no_motion(browser: Browser, system: Launched) -> None:
    with Watched.opened(browser, system.url, reduced_motion="reduce") as watched, answers_open(system, 1, 600):
        watched.until(lambda: watched.figure("tokens") > 0, "tokens flow")
        offsets = "[...document.querySelectorAll('.edge .flow')].map(each => each.getAttribute('stroke-dashoffset'))"
        before = watched.page.evaluate(offsets)
        watched.page.wait_for_timeout(400)
        assert watched.page.evaluate(offsets) == before


def test_a_key_is_asked_for_where_one_is_wanted_and_kept_in_the_tab(browser: Browser, system: Launched) -> None:
    context = browser.new_context()
    page = context.new_page()
    seen: list[Any] = []

    def answer(route: Route) -> None:
        key = route.request.headers.get("authorization")
        seen.append(key)
        if key == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "An API key is required."}})

    page.route("**/dashboard/api/**", answer)
    page.goto(f"{system.url}/dashboard")
    for key in ("wrong", "right"):
        expect(page.locator("#key-dialog")).to_be_visible()
        page.locator("#key").fill(key)
        page.locator("#key").press("Enter")
    expect(page.locator("#link")).to_have_text("live")
    assert {None, "Bearer wrong", "Bearer right"} <= set(seen)
    assert page.evaluate("[sessionStorage.length, Object.values(localStorage).includes('right')]") == [1, False]
    context.close()
