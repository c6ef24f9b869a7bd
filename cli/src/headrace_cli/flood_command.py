"""`headrace flood`: sends load to a server and measures what its users would feel; `headrace flood compare A B`."""

import asyncio
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace_cli.errors import CommandError
from headrace_cli.flood import arrivals
from headrace_cli.flood.arrivals import Arrival
from headrace_cli.flood.conversation import WORDS, Author
from headrace_cli.flood.generator import Generator
from headrace_cli.flood.http_client import ConnectionBroken, HttpClient, Target, WholeAnswer
from headrace_cli.flood.live import View, make_view
from headrace_cli.flood.meter import Meter, Slo, Window
from headrace_cli.flood.page import page
from headrace_cli.flood.report import Report, encode_report, make_report, read_report
from headrace_cli.flood.settings import FloodSettings
from headrace_cli.flood.summary import compare, describe, summary
from headrace_shared.errors import ConfigError
from headrace_shared.settings import EXIT_CONFIG, load_settings

SHOW_PERIOD_S = 0.5
ASK_TIMEOUT_S = 10.0
SPARE_FILES = 64
DESCRIPTION = (
    "Sends load to a server and measures what its users would feel. `headrace flood compare A.json B.json` puts two "
    "reports beside each other. All rates are of one window, from --warmup to --duration, and counts divided by its "
    "length: offered are the requests that were due in it, throughput the answers that became complete in it, goodput "
    "those of them that met --slo-ttft and --slo-tpot. What is complete later counts for the latencies and the share "
    "of good answers, and in no rate: a --warmup longer than an answer takes makes up for it."
)


def run(argv: Sequence[str]) -> int:
    if argv and argv[0] == "compare":
        return _compare(argv[1:])
    settings = load_settings(FloodSettings, argv, os.environ, prog="headrace flood", description=DESCRIPTION)
    settings.check()
    target = Target.parse(settings.url)
    _allow_files(max(settings.max_open, settings.concurrency or 0))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        report = runner.run(_flood(settings, target))
    _write(settings.json, encode_report(report))
    _write(settings.html, page(report).encode())
    if settings.json != "-" and settings.html != "-":
        sys.stdout.write(summary(report))
    return 0 if report.num_complete else 1


def _compare(paths: Sequence[str]) -> int:
    if len(paths) != 2 or any(path.startswith("-") for path in paths):
        sys.stderr.write("usage: headrace flood compare A.json B.json\n")
        return EXIT_CONFIG
    sys.stdout.write(compare(read_report(paths[0]), read_report(paths[1]), paths))
    return 0


async def _flood(settings: FloodSettings, target: Target) -> Report:
    client = HttpClient(target, settings.api_key)
    try:
        model = settings.model or await _first_model(client, settings.url)
        author = Author(settings, model, await _tokens_per_word(client, model))
        meter = Meter(
            Window(settings.warmup, settings.duration), Slo(settings.slo_ttft / 1000.0, settings.slo_tpot / 1000.0)
        )
        generator = Generator(settings, client, author, meter)
        begun = _arrivals(settings)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, generator.stop)
        # The report may go to standard output, so what is shown meanwhile does not.
        title = f"{model} at {settings.url}: {describe(public(settings))}"
        view = make_view(title, settings.duration, os.environ, sys.stderr)
        started_at = time.time()
        work = asyncio.create_task(generator.run(begun), name="flood")
        try:
            await _show(view, meter, generator, work)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            view.close()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        work.result()
        return make_report(meter, public(settings), model, started_at, generator.load_s)
    finally:
        client.close()


async def _show(view: View, meter: Meter, generator: Generator, work: "asyncio.Task[None]") -> None:
    while not work.done():
        await asyncio.wait({work}, timeout=SHOW_PERIOD_S)
        meter.tick(generator.now())
        view.show(meter, generator.now())


def public(settings: FloodSettings) -> dict[str, Any]:
    """What a report tells of the settings."""
    hidden = ("api_key", "json", "html")
    return {name: value for name, value in msgspec.structs.asdict(settings).items() if name not in hidden}


def _arrivals(settings: FloodSettings) -> Iterable[Arrival]:
    duration = settings.duration
    if settings.trace:
        try:
            lines = Path(settings.trace).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--trace", f"cannot read {settings.trace}: {error}") from error
        return arrivals.traced(lines, settings.trace_speed, duration, settings.trace)
    if settings.rate is None:
        return ()
    match settings.arrivals:
        case "poisson":
            return arrivals.poisson(settings.rate, duration, random.Random(settings.seed))
        case "constant":
            return arrivals.constant(settings.rate, duration)
        case "burst":
            return arrivals.burst(settings.rate, duration, settings.burst_size)
        case "ramp":
            return arrivals.ramp(settings.rate, duration)


async def _first_model(client: HttpClient, url: str) -> str:
    status, body = await _ask(client, "GET", "/v1/models", b"", url)
    if status == 401:
        raise CommandError(f"{url} wants an API key", "set HEADRACE_API_KEY or --api-key-file")
    try:
        models = [str(model["id"]) for model in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise CommandError(f"{url} gave no list of models (HTTP {status})", "name one with --model") from error
    if not models:
        raise CommandError("the server has no model yet", "wait until a worker has loaded one")
    return models[0]


async def _tokens_per_word(client: HttpClient, model: str) -> float:
    """As the server's own tokenizer counts; 1 if the server does not tell."""
    body = msgspec.json.encode({"model": model, "prompt": " ".join(WORDS)})
    status, answer = await _ask(client, "POST", "/tokenize", body, "")
    try:
        return max(0.1, msgspec.json.decode(answer)["count"] / len(WORDS)) if status == 200 else 1.0
    except (msgspec.DecodeError, KeyError, TypeError):
        return 1.0


async def _ask(client: HttpClient, method: str, path: str, body: bytes, url: str) -> tuple[int, bytes]:
    answer = WholeAnswer()
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            await client.send(method, path, body, answer)
    except (OSError, TimeoutError, ConnectionBroken) as error:
        problem = f"{url or path} does not answer: {str(error) or type(error).__name__}"
        raise CommandError(problem, "start it with `headrace up` or name another with --url") from error
    return answer.status, bytes(answer.body)


def _write(path: str, data: bytes) -> None:
    if path == "-":
        sys.stdout.write(data.decode() + "\n")
    elif path:
        try:
            Path(path).expanduser().write_bytes(data)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _allow_files(num_open: int) -> None:
    """A connection takes a file descriptor, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_open + SPARE_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
