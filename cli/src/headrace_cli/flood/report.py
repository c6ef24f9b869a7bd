"""The figures of a flood. Pure."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from headrace_cli.errors import CommandError
from headrace_cli.flood.meter import UNFINISHED, Exchange, Meter, Window
from headrace_shared.quantiles import quantile

SCHEMA = "headrace.flood/2"
MAX_ROWS = 100_000
"""Requests that a report lists one by one."""
MAX_REPORT_BYTES = 256 << 20


class Spread(Struct, frozen=True, kw_only=True):
    """Milliseconds; None without values."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Seconds(Struct, frozen=True, kw_only=True):
    """Second by second, columns of equal length. What came after the load had ended is there too."""

    due: list[int] = []
    complete: list[int] = []
    errors: list[int] = []
    open: list[int] = []
    """Requests without an answer at the second's end."""
    tokens: list[float] = []
    ttft_p50_ms: list[float | None] = []
    ttft_p99_ms: list[float | None] = []


class Rows(Struct, frozen=True, kw_only=True):
    """Request by request, columns of equal length."""

    due_s: list[float] = []
    ttft_ms: list[float | None] = []
    tpot_ms: list[float | None] = []
    latency_ms: list[float | None] = []
    prompt_tokens: list[int] = []
    output_tokens: list[int] = []
    error: list[str] = []


class Report(Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    started_at: str = ""
    """UTC, ISO 8601."""
    settings: dict[str, Any] = {}
    """Without keys."""
    model: str = ""
    window_s: float = 0.0
    """From the end of the warm-up to the end of the load. Every rate below is a count of what fell into it, by its
    length."""
    num_requests: int = 0
    """Due in the window. The counts that follow are of these, whenever they ended."""
    num_complete: int = 0
    num_late: int = 0
    """Complete, but after the window: no rate holds them."""
    num_good: int = 0
    """Complete and within the objective."""
    num_unfinished: int = 0
    """Still running when the flood was over."""
    errors: dict[str, int] = {}
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, from the server's prefix cache."""
    output_tokens: int = 0
    offered_per_s: float = 0.0
    """Requests that were due in the window."""
    complete_per_s: float = 0.0
    """Answers that became complete in the window."""
    good_per_s: float = 0.0
    """Those of them that are within the objective."""
    good_share: float = 0.0
    """`num_good` of `num_requests`."""
    output_tokens_per_s: float = 0.0
    """By the time of arrival."""
    ttft: Spread = Spread()
    """Time to first token, from when the request was due."""
    tpot: Spread = Spread()
    """Mean time of the later tokens, by request."""
    itl: Spread = Spread()
    """Between two pieces of text of a stream (inter-token latency)."""
    latency: Spread = Spread()
    """From due to complete."""
    send_lag: Spread = Spread()
    """From due to sent: how late the generator itself was."""
    itl_histogram: list[tuple[float, int]] = []
    """(milliseconds, count)."""
    seconds: Seconds = Seconds()
    rows: Rows = Rows()


def make_report(meter: Meter, settings: dict[str, Any], model: str, started_at: float, load_s: float) -> Report:
    """`started_at`: seconds since the epoch. `load_s`: how long load was made."""
    begin, end = meter.window.begin, min(meter.window.end, load_s)
    window, window_s = Window(begin, end), max(end - begin, 1e-9)
    chosen = [exchange for exchange in meter.exchanges if window.holds(exchange.due_at)]
    complete = [exchange for exchange in chosen if exchange.is_complete]
    good = [exchange for exchange in complete if meter.slo.is_met(exchange)]
    in_time = [each for each in meter.exchanges if each.is_complete and window.holds(each.ended_at or 0.0)]
    per_chunk = meter.tokens_per_chunk
    errors: dict[str, int] = {}
    for exchange in chosen:
        if exchange.error and exchange.error != UNFINISHED:
            errors[exchange.error] = errors.get(exchange.error, 0) + 1
    return Report(
        started_at=datetime.fromtimestamp(started_at, UTC).isoformat(timespec="seconds"),
        settings=settings,
        model=model,
        window_s=window_s,
        num_requests=len(chosen),
        num_complete=len(complete),
        num_late=sum(not window.holds(exchange.ended_at or 0.0) for exchange in complete),
        num_good=len(good),
        num_unfinished=sum(exchange.error == UNFINISHED for exchange in chosen),
        errors=errors,
        prompt_tokens=sum(exchange.num_prompt_tokens for exchange in complete),
        cached_tokens=sum(exchange.num_cached_tokens for exchange in complete),
        output_tokens=sum(exchange.num_output_tokens for exchange in complete),
        offered_per_s=len(chosen) / window_s,
        complete_per_s=len(in_time) / window_s,
        good_per_s=sum(meter.slo.is_met(exchange) for exchange in in_time) / window_s,
        good_share=len(good) / len(chosen) if chosen else 0.0,
        output_tokens_per_s=meter.num_window_chunks * per_chunk / window_s,
        ttft=spread(exchange.ttft_s for exchange in chosen),
        tpot=spread(exchange.tpot_s for exchange in complete),
        itl=_spread_of_gaps(meter),
        latency=spread(_latency(exchange) for exchange in complete),
        send_lag=spread(None if each.sent_at is None else each.sent_at - each.due_at for each in chosen),
        itl_histogram=[(1000.0 * seconds, count) for seconds, count in meter.gaps.filled()],
        seconds=_seconds(meter, per_chunk),
        rows=_rows(chosen[:MAX_ROWS]),
    )


def spread(values: Iterable[float | None]) -> Spread:
    """Of seconds; None are left out."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return Spread()
    return Spread(
        count=len(known),
        mean=1000.0 * sum(known) / len(known),
        p50=_ms(percentile(known, 50)),
        p90=_ms(percentile(known, 90)),
        p95=_ms(percentile(known, 95)),
        p99=_ms(percentile(known, 99)),
        max=_ms(known[-1]),
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """None without values."""
    return quantile(values, percent / 100.0) if values else None


def encode_report(report: Report) -> bytes:
    return msgspec.json.encode(report)


def read_report(path: str) -> Report:
    """Raises CommandError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_REPORT_BYTES + 1)
        report = msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CommandError(f"{path} is no report of a flood: {error}") from error
    if report.schema != SCHEMA:
        raise CommandError(f"{path} is of the schema {report.schema!r}, not {SCHEMA!r}")
    return report


def _latency(exchange: Exchange) -> float | None:
    return None if exchange.ended_at is None else exchange.ended_at - exchange.due_at


def _spread_of_gaps(meter: Meter) -> Spread:
    gaps = meter.gaps
    if not gaps.num_values:
        return Spread()
    p50, p90, p95, p99 = (_ms(gaps.percentile(percent)) for percent in (50, 90, 95, 99))
    mean = 1000.0 * gaps.total_s / gaps.num_values
    return Spread(count=gaps.num_values, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=_ms(gaps.largest_s))


def _seconds(meter: Meter, per_chunk: float) -> Seconds:
    return Seconds(
        due=[second.num_due for second in meter.seconds],
        complete=[second.num_complete for second in meter.seconds],
        errors=[second.num_errors for second in meter.seconds],
        open=[second.num_open for second in meter.seconds],
        tokens=[round(second.num_chunks * per_chunk, 1) for second in meter.seconds],
        ttft_p50_ms=[_ms(percentile(second.ttfts_s, 50)) for second in meter.seconds],
        ttft_p99_ms=[_ms(percentile(second.ttfts_s, 99)) for second in meter.seconds],
    )


def _rows(exchanges: Sequence[Exchange]) -> Rows:
    return Rows(
        due_s=[round(exchange.due_at, 4) for exchange in exchanges],
        ttft_ms=[_ms(exchange.ttft_s) for exchange in exchanges],
        tpot_ms=[_ms(exchange.tpot_s) for exchange in exchanges],
        latency_ms=[_ms(_latency(exchange)) for exchange in exchanges],
        prompt_tokens=[exchange.num_prompt_tokens for exchange in exchanges],
        output_tokens=[exchange.num_output_tokens for exchange in exchanges],
        error=[exchange.error for exchange in exchanges],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000.0 * seconds, 3)
