"""`headrace top`: the fleet in a terminal, once a second, as a router sees it."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace_cli.errors import CommandError
from headrace_cli.router_client import router_client
from headrace_cli.settings import TopSettings
from headrace_cli.top_view import GRAPH_S, render
from headrace_shared.fleet_frame import Frame
from headrace_shared.settings import load_settings

PATH = "/dashboard/api/live"
SILENCE_S = 5.0
RETRY_S = 1.0


class Columns(Struct, frozen=True):
    """A value for each second."""

    queue: list[int | None] = []
    tokens_per_s: list[float] = []


class Past(Struct, frozen=True):
    columns: Columns = Columns()


decode_frame = msgspec.json.Decoder(Frame).decode
decode_past = msgspec.json.Decoder(Past).decode


class Seen(NamedTuple):
    frame: Frame
    data: str
    """The frame as it came."""
    queue: deque[int | None]
    tokens: deque[float]


def run(argv: Sequence[str]) -> int:
    settings = load_settings(
        TopSettings,
        argv,
        os.environ,
        prog="headrace top",
        description="Shows the fleet once a second: queue, batches, KV blocks, tokens a second.",
    )
    with router_client(settings.url, settings.api_key, httpx.Timeout(SILENCE_S)) as client:
        if settings.once or settings.json or not sys.stdout.isatty():
            _show_once(client, settings)
        else:
            _show_always(client, settings)
    return 0


def _show_once(client: httpx.Client, settings: TopSettings) -> None:
    for seen in _follow(client):
        if settings.json:
            sys.stdout.write(seen.data + "\n")
        else:
            console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 160)
            console.print(render(seen.frame, settings.url, seen.queue, seen.tokens))
        return
    raise CommandError(f"{settings.url} broke off before it had told anything")


def _show_always(client: httpx.Client, settings: TopSettings) -> None:
    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
        while True:
            try:
                for seen in _follow(client):
                    live.update(render(seen.frame, settings.url, seen.queue, seen.tokens), refresh=True)
                reason = "the connection ended"
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
            live.update(Text(f"{settings.url} does not answer: {reason}", style="yellow"), refresh=True)
            time.sleep(RETRY_S)


def _follow(client: httpx.Client) -> Iterator[Seen]:
    """Every frame until the stream ends. Raises CommandError for what will not get better."""
    queue: deque[int | None] = deque(maxlen=GRAPH_S)
    tokens: deque[float] = deque(maxlen=GRAPH_S)
    with client.stream("GET", PATH) as response:
        if response.status_code == 401:
            raise CommandError("the router wants an API key", "set HEADRACE_API_KEY or --api-key-file")
        if response.status_code == 404:
            raise CommandError("this router shows no figures", "is --url a Headrace router, and its dashboard on?")
        if response.status_code != 200:
            raise CommandError(f"HTTP {response.status_code} from {client.base_url}")
        for name, data in _events(response):
            try:
                if name == "past":
                    columns = decode_past(data).columns
                    queue.extend(columns.queue)
                    tokens.extend(columns.tokens_per_s)
                    continue
                frame = decode_frame(data)
            except msgspec.DecodeError as error:
                raise CommandError(f"the router's figures are not understandable: {error}") from error
            queue.append(frame.totals.queue)
            tokens.append(frame.totals.tokens_per_s)
            yield Seen(frame, data, queue, tokens)


def _events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    name = "message"
    for line in response.iter_lines():
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield name, line.removeprefix("data:").strip()
