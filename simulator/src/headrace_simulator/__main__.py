"""`headrace simulate`: a fleet's day under several policies, in minutes."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace_shared.errors import ConfigError
from headrace_shared.settings import EXIT_CONFIG, load_settings_or_exit
from headrace_simulator import checking
from headrace_simulator.plan import make_cluster, make_gate, make_kind, make_plan, make_scaler
from headrace_simulator.plots import draw, has_matplotlib
from headrace_simulator.recorder import Result
from headrace_simulator.settings import SimulateSettings
from headrace_simulator.simulation import simulate
from headrace_simulator.table import make_table

PROG = "headrace simulate"
MAX_CHECKED_WORKERS = 16
CHECKED_S = 40.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """report.json."""

    settings: SimulateSettings
    results: list[Result]


def main() -> int:
    settings = load_settings_or_exit(
        SimulateSettings,
        prog=PROG,
        description="Runs a day of traffic against a simulated fleet, once for each policy. The autoscaler's policy "
        "and the router's admission are their own code; with --detail tokens so are the scheduler's core and "
        "the workers' loops.",
    )
    try:
        return _check(settings) if settings.check else _compare(settings)
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return EXIT_CONFIG


def _check(settings: SimulateSettings) -> int:
    kind = make_kind(settings)
    num_workers = max(1, min(MAX_CHECKED_WORKERS, settings.gpus // settings.gpus_per_worker))
    comparisons = [checking.compare(kind, num_workers, CHECKED_S, settings.seed, load) for load in checking.LOADS]
    sys.stdout.write(checking.make_table(comparisons))
    return 0


def _compare(settings: SimulateSettings) -> int:
    kinds = _kinds(settings)
    plan = make_plan(settings)
    results = []
    for policy in settings.policies:
        scaler, num_first = make_scaler(settings, plan, policy)
        frame = plan.frame._replace(num_first=num_first)
        results.append(
            simulate(policy, frame, make_cluster(settings, plan), scaler, make_gate(settings, plan), _progress(policy))
        )
        sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
    sys.stdout.write(make_table(results))
    if settings.out:
        folder = Path(settings.out).expanduser()
        _write(folder, settings, results)
        for path in draw(results, folder, kinds) if kinds else []:
            sys.stdout.write(f"{path}\n")
    return 0


def _write(folder: Path, settings: SimulateSettings, results: list[Result]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_bytes(msgspec.json.encode(Report(settings=settings, results=results)))
    except OSError as error:
        raise ConfigError("out", f"cannot write to {folder}: {error.strerror}") from error
    sys.stdout.write(f"{folder / 'report.json'}\n")


def _kinds(settings: SimulateSettings) -> list[str]:
    """Of the plots. Raises ConfigError, before hours are simulated, if they cannot be drawn."""
    if settings.plots == "none" or not settings.out:
        return []
    if settings.plots != "auto" and not has_matplotlib():
        raise ConfigError("plots", "needs matplotlib: pip install headrace-simulator[plots]")
    if settings.plots in ("auto", "both"):
        return ["svg", "png"] if has_matplotlib() else []
    return [settings.plots]


def _progress(policy: str) -> Callable[[float], None]:
    def tell(share: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{policy}: {100 * share:.0f} %\x1b[K")
            sys.stderr.flush()

    return tell


if __name__ == "__main__":
    sys.exit(main())
