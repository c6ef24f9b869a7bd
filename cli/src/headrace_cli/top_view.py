"""The fleet as text. Pure."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace_cli.flood.live import bars
from headrace_shared.fleet_frame import Frame, Totals, WorkerFrame

BAR_CELLS = 20
GRAPH_S = 60
NONE = "–"


def render(frame: Frame, url: str, queue: Sequence[int | None], tokens: Sequence[float]) -> RenderableType:
    """`queue` and `tokens`: the last seconds' values."""
    at = f"{datetime.fromtimestamp(frame.at):%H:%M:%S}"
    parts: list[RenderableType] = [
        Text(f"Headrace at {url}   {at}", style="bold"),
        _totals(frame.totals, queue, tokens),
        _services(frame),
    ]
    if frame.workers:
        parts.append(_workers(frame))
    return Group(*parts)


def _totals(totals: Totals, queue: Sequence[int | None], tokens: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 2))
    waits = [float(value or 0) for value in queue][-GRAPH_S:]
    table.add_row("waiting", _count(totals.queue), Text(bars(waits), style="yellow"))
    table.add_row("tokens/s", f"{totals.tokens_per_s:,.0f}", Text(bars(list(tokens)[-GRAPH_S:]), style="cyan"))
    table.add_row("TTFT", f"{_ms(totals.ttft_p50_ms)} p50, {_ms(totals.ttft_p99_ms)} p99", f"{totals.in_flight:,} open")
    table.add_row("batch", f"{totals.batch:.0%}", f"{totals.running:,} sequences running")
    others = [
        f"{number} {name}"
        for number, name in ((totals.starting, "starting"), (totals.draining, "draining"), (totals.parked, "parked"))
        if number
    ]
    wanted = "" if totals.desired is None else f" of {totals.desired} wanted"
    table.add_row("KV", f"{totals.kv:.0%}", ", ".join([f"{totals.ready} workers ready{wanted}", *others]))
    return table


def _services(frame: Frame) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("SERVICE", "ID", "STATE", "FIGURES"):
        table.add_column(heading)
    for router in frame.routers:
        ttft = f"TTFT {_ms(router.ttft_p50_ms)} p50, {_ms(router.ttft_p99_ms)} p99"
        figures = f"{router.in_flight} open, {router.requests_per_s:.1f} requests/s, {ttft}"
        table.add_row("router", Text(router.id), _state(router.state), figures)
    for queue in frame.queues:
        table.add_row("queue", Text(queue.model), "", f"{_count(queue.waiting)} waiting, {_count(queue.taken)} taken")
    for each in frame.schedulers:
        figures = f"{each.waiting} in the window, {each.running} placed, oldest waits {each.oldest_wait_s:.1f} s"
        figures += f", {each.preemptions} preemptions, {each.losses} losses"
        table.add_row("scheduler", Text(each.id), _state(each.state), figures)
    for autoscaler in frame.autoscalers:
        told = []
        for model in autoscaler.models:
            most = "" if model.most is None else f" of at most {model.most}"
            soon = "" if model.coming_in_s is None else f" in {model.coming_in_s:.0f} s"
            coming = f", {model.coming} coming{soon}" if model.coming else ""
            told.append(f"{model.model}: wants {model.desired}{most}{coming}")
        lead = "" if autoscaler.is_leader else "stands by; "
        table.add_row("autoscaler", Text(autoscaler.id), _state(autoscaler.state), Text(lead + "; ".join(told)))
    return table


def _workers(frame: Frame) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("WORKER", "MODEL", "STATE", "BATCH", "KV BLOCKS", "", "TOKENS/S", "PREFILL/S"):
        is_number = heading in ("BATCH", "KV BLOCKS", "TOKENS/S", "PREFILL/S")
        table.add_column(heading, justify="right" if is_number else "left")
    for worker in frame.workers:
        stalled = f" ({worker.stalled} stalled)" if worker.stalled else ""
        table.add_row(
            Text(worker.id),
            Text(worker.model),
            _state(worker.state),
            f"{worker.running}/{worker.max_sequences}{stalled}",
            f"{worker.blocks_held:,}/{worker.blocks:,}",
            _bar(worker),
            f"{worker.tokens_per_s:,.0f}",
            f"{worker.prefill_per_s:,.0f}",
        )
    if frame.num_workers > len(frame.workers):
        table.add_row(f"and {frame.num_workers - len(frame.workers)} more", *[""] * 7)
    return table


def _bar(worker: WorkerFrame) -> Text:
    share = worker.blocks_held / worker.blocks if worker.blocks else 0.0
    full = round(BAR_CELLS * share)
    return Text("█" * full + "░" * (BAR_CELLS - full), style="yellow" if share > 0.9 else "cyan")


def _state(state: str) -> Text:
    return Text(state, style="green" if state in ("ready", "running") else "yellow")


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f} ms"
