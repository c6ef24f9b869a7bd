"""The report as one HTML page that needs nothing else: no script, no font, no address. Pure."""

from html import escape

from headrace_cli.flood.plot import Axis, Line, plot
from headrace_cli.flood.report import Report, Seconds, Spread
from headrace_cli.flood.summary import LATE_MS, describe

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2733; --soft: #5b6b7a; --line: #d9e0e6; --paper: #fbfcfd; --card: #fff;
  --s1: #0b7285; --s2: #d9480f; --s3: #5f3dc4; --s4: #2b8a3e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --soft: #93a3b3; --line: #2c3843; --paper: #10161c;
  --card: #18212a; --s1: #3bc9db; --s2: #ff922b; --s3: #b197fc; --s4: #69db7c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 24px;
  max-width: 1080px; }
h1 { font-size: 22px; margin: 0 0 4px; } p { margin: 4px 0 16px; color: var(--soft); }
.warning { color: var(--s2); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.numbers div, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.numbers b { display: block; font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 0 0 20px; }
.wide { overflow-x: auto; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); font-weight: 400; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 6px; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
.grid { stroke: var(--line); stroke-width: 1; } .tick, .label { fill: var(--soft); font-size: 11px; }
.series { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.s1 { stroke: var(--s1); --key: var(--s1); } .s2 { stroke: var(--s2); --key: var(--s2); }
.s3 { stroke: var(--s3); --key: var(--s3); } .s4 { stroke: var(--s4); --key: var(--s4); }
.legend { display: flex; flex-wrap: wrap; gap: 14px; font-size: 13px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: var(--key); }
"""


def page(report: Report) -> str:
    settings = report.settings
    title = f"Flood of {report.model}"
    late = report.send_lag.p99 or 0.0
    warning = (
        f'<p class="warning">The generator itself was late (p99 {late:.0f} ms); the latencies include that.</p>'
        if late > LATE_MS
        else ""
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{escape(describe(settings))}. {escape(str(settings['url']))}, {escape(report.started_at)}, "
        f"window {report.window_s:.1f} s.</p>{warning}{_numbers(report)}{_table(report)}"
        f'<div class="plots">{_plots(report)}</div>{_errors(report)}{_settings(report)}</body></html>\n'
    )


def _numbers(report: Report) -> str:
    settings = report.settings
    tiles = (
        (f"{report.output_tokens_per_s:,.1f}", "output tokens/s"),
        (f"{report.complete_per_s:.2f}", f"requests/s complete in the window; {report.offered_per_s:.2f} were due"),
        (
            f"{report.good_per_s:.2f}",
            f"good requests/s of these: TTFT ≤ {settings['slo_ttft']:g} ms, TPOT ≤ {settings['slo_tpot']:g} ms; "
            f"{report.good_share:.1%} of all that were due",
        ),
        (
            f"{sum(report.errors.values())}",
            f"errors, and {report.num_unfinished} unfinished, of {report.num_requests}; "
            f"{report.num_late} were complete after the window",
        ),
    )
    shown = "".join(f"<div><b>{value}</b><span>{text}</span></div>" for value, text in tiles)
    return f'<div class="numbers">{shown}</div>'


def _table(report: Report) -> str:
    rows = (
        ("Time to first token", report.ttft),
        ("Time per output token", report.tpot),
        ("Inter-token latency", report.itl),
        ("Whole answer", report.latency),
        ("Generator's delay", report.send_lag),
    )
    body = "".join(f"<tr><td>{name}</td>{_cells(spread)}</tr>" for name, spread in rows)
    head = "<th>ms</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th><th>max</th><th>mean</th><th>values</th>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(spread: Spread) -> str:
    values = (spread.p50, spread.p90, spread.p95, spread.p99, spread.max, spread.mean)
    shown = "".join("<td>–</td>" if value is None else f"<td>{value:,.1f}</td>" for value in values)
    return f"{shown}<td>{spread.count:,}</td>"


def _plots(report: Report) -> str:
    seconds, rows, time = report.seconds, report.rows, Axis("seconds")
    return "".join(
        (
            plot([_line("output tokens/s", seconds.tokens, 1)], time, Axis("tokens/s"), "Throughput"),
            plot(
                [_line("p50", seconds.ttft_p50_ms, 1), _line("p99", seconds.ttft_p99_ms, 2)],
                time, Axis("ms"), "Time to first token, by the second in which it came",
            ),
            plot(_loads(seconds), time, Axis("requests/s"), "Offered and complete"),
            plot([_line("open", seconds.open, 3)], time, Axis("requests"), "Requests without an answer"),
            plot(
                [
                    _share("time to first token", rows.ttft_ms, 1),
                    _share("whole answer", rows.latency_ms, 3),
                    _share("time per output token", rows.tpot_ms, 4),
                ],
                Axis("ms", is_log=True), Axis("% of requests"), "Share of requests that took no longer",
            ),
            plot(
                [Line("pieces of text", _shares(report.itl_histogram), 2)],
                Axis("ms", is_log=True), Axis("% of gaps"), "Inter-token latency: share of gaps that were no longer",
            ),
        )
    )  # fmt: skip


def _line(name: str, values: "list[float] | list[float | None] | list[int]", colour: int) -> Line:
    return Line(name, [(float(at), value) for at, value in enumerate(values)], colour)


def _loads(seconds: Seconds) -> list[Line]:
    return [_line("due", seconds.due, 3), _line("complete", seconds.complete, 4), _line("errors", seconds.errors, 2)]


MAX_POINTS = 400


def _share(name: str, values: list[float | None], colour: int) -> Line:
    known = sorted(value for value in values if value is not None)
    step = max(1, len(known) // MAX_POINTS)
    points = [(value, 100.0 * (rank + 1) / len(known)) for rank, value in enumerate(known)]
    return Line(name, [*points[::step], *points[-1:]], colour, is_step=True)


def _shares(histogram: list[tuple[float, int]]) -> list[tuple[float, float | None]]:
    total, seen = sum(count for _, count in histogram), 0
    points: list[tuple[float, float | None]] = []
    for value, count in histogram:
        seen += count
        points.append((value, 100.0 * seen / total))
    return points


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{count}</td></tr>" for name, count in sorted(report.errors.items()))
    return f"<h2>Errors</h2><table><tbody>{rows}</tbody></table>"


def _settings(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in report.settings.items()
    )
    return f"<details><summary>Settings</summary><table><tbody>{rows}</tbody></table></details>"
