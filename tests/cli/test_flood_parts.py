"""The pure parts of `headrace flood`."""

import random
from itertools import pairwise

import pytest

from headrace_cli.flood import arrivals
from headrace_cli.flood.arrivals import Arrival
from headrace_cli.flood.conversation import Author
from headrace_cli.flood.histogram import Histogram
from headrace_cli.flood.lengths import parse_lengths
from headrace_cli.flood.meter import UNFINISHED, Meter, Slo, Window
from headrace_cli.flood.plot import Axis, Line, plot
from headrace_cli.flood.report import make_report
from headrace_cli.flood.settings import FloodSettings
from headrace_shared.errors import ConfigError


def test_poisson_arrivals_have_the_mean_and_the_spread_of_a_poisson_process() -> None:
    times = [arrival.at for arrival in arrivals.poisson(50.0, 200.0, random.Random(1))]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.05) and variance**0.5 == pytest.approx(mean, rel=0.1)
    assert times == sorted(times) and times[-1] < 200.0


def test_poisson_arrivals_are_as_many_as_were_asked_for() -> None:
    for seed in range(20):
        times = [arrival.at for arrival in arrivals.poisson(8.0, 15.0, random.Random(seed))]
        assert len(times) == 120 and times[0] >= 0.0 and times == sorted(times) and times[-1] < 15.0
    assert len(list(arrivals.poisson(0.1, 1.0, random.Random(1)))) == 1


def test_bursts_come_at_once_and_at_the_rate_on_average() -> None:
    times = [arrival.at for arrival in arrivals.burst(10.0, 4.0, 5)]
    assert times == [0.5 * (number // 5) for number in range(40)]


def test_a_ramp_rises_evenly_to_twice_the_rate() -> None:
    times = [arrival.at for arrival in arrivals.ramp(10.0, 20.0)]
    counts = [sum(second <= at < second + 5 for at in times) for second in (0, 5, 10, 15)]
    assert len(times) == 200 and counts == pytest.approx([12.5, 37.5, 62.5, 87.5], abs=1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "line 2"),
        ('{"timestamp": 5, "input_length": 0, "output_length": 1}', "at least 1"),
        ('{"timestamp": -5, "input_length": 1, "output_length": 1}', "earlier"),
    ],
)
def test_a_bad_trace_names_its_line(line: str, problem: str) -> None:
    lines = ['{"timestamp": 0, "input_length": 1, "output_length": 1}', line]
    with pytest.raises(ConfigError, match=problem):
        arrivals.traced(lines, 1.0, 60.0, "file")


@pytest.mark.parametrize(
    ("text", "least", "most", "mean"),
    [
        ("128", 128, 128, 128),
        ("uniform:10:30", 10, 30, 20),
        ("normal:100:10", 50, 150, 100),
        ("lognormal:100:0.5", 5, 2000, 113.3),
        ("choice:1:3", 1, 3, 2),
    ],
)
def test_lengths_follow_their_distribution(text: str, least: int, most: int, mean: float) -> None:
    rng, lengths = random.Random(3), parse_lengths(text, "--prompt-tokens")
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert least <= min(drawn) and max(drawn) <= most
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("text", ["", "x", "0", "uniform:3:1", "uniform:1", "gauss:1:2", "normal:nan:1", "1.5", "-4"])
def test_lengths_that_make_no_sense_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        parse_lengths(text, "--prompt-tokens")


def test_percentiles_of_a_histogram_are_within_a_percent() -> None:
    rng, histogram = random.Random(5), Histogram()
    values = sorted(rng.lognormvariate(-3.0, 1.0) for _ in range(20_000))
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 90, 99, 99.9):
        assert histogram.percentile(percent) == pytest.approx(values[int(percent / 100 * len(values)) - 1], rel=0.011)
    assert histogram.percentile(100) == pytest.approx(values[-1], rel=0.011)
    assert Histogram().percentile(50) is None


def test_the_same_seed_writes_the_same_conversations_and_no_two_begin_alike() -> None:
    def first_words(seed: int) -> list[str]:
        author = Author(FloodSettings(seed=seed, prompt_tokens="uniform:20:40"), "m", 1.0)
        return [author.message(author.script(number, Arrival(0.0)), 0)[:30] for number in range(300)]

    assert first_words(1) == first_words(1) != first_words(2)
    assert len(set(first_words(1))) == 300


def test_a_report_tells_good_from_complete_and_leaves_the_warm_up_out() -> None:
    meter = Meter(Window(1.0, 3.0), Slo(ttft_s=0.5, tpot_s=0.1))
    for due, first, gap, error in (
        (0.5, 0.1, 0.01, ""),  # before the window
        (1.0, 0.1, 0.01, ""),  # good
        (1.2, 0.9, 0.01, ""),  # late
        (1.4, 0.1, 0.30, ""),  # slow
        (1.6, 0.1, 0.01, "http 500"),
        (1.8, 0.1, 0.01, UNFINISHED),
    ):
        exchange = meter.due(due)
        meter.sent(exchange, due)
        for number in range(3):
            meter.chunk(exchange, due + first + number * gap)
        meter.ended(exchange, due + first + 2 * gap, error)
    report = make_report(meter, {}, "m", 0.0, 3.0)
    assert (report.num_requests, report.num_complete, report.num_good) == (5, 3, 1)
    assert (report.num_unfinished, report.errors) == (1, {"http 500": 1})
    # In the window the first one became complete, too: it was due before.
    assert (report.offered_per_s, report.complete_per_s) == (2.5, 1.5) and report.num_late == 0
    assert report.good_per_s == 0.5 and report.good_share == 0.2
    assert report.ttft.max == pytest.approx(900.0) and report.tpot.max == pytest.approx(300.0)
    # Fifteen pieces of those due in the window; the first request's came before it.
    assert report.output_tokens_per_s == pytest.approx(15 / 2.0)


def test_rates_are_counts_of_what_fell_into_the_window() -> None:
    meter = Meter(Window(2.0, 12.0), Slo(ttft_s=10.0, tpot_s=10.0))
    for number in range(13):  # one a second, each answered 1.5 s later
        exchange = meter.due(float(number))
        meter.chunk(exchange, number + 1.4)
        meter.ended(exchange, number + 1.5)
    report = make_report(meter, {}, "m", 0.0, 12.0)
    assert (report.num_requests, report.num_complete, report.num_late, report.num_good) == (10, 10, 1, 10)
    # One is complete in the window that was due before it, and one that was due in it is complete later.
    assert (report.offered_per_s, report.complete_per_s, report.good_per_s) == (1.0, 1.0, 1.0)
    without_warmup = Meter(Window(0.0, 10.0), Slo(ttft_s=10.0, tpot_s=10.0))
    for number in range(10):
        exchange = without_warmup.due(float(number))
        without_warmup.ended(exchange, number + 1.5)
    report = make_report(without_warmup, {}, "m", 0.0, 10.0)
    assert report.offered_per_s == 1.0 and report.complete_per_s == 0.9 >= report.good_per_s


def test_settings_that_exclude_each_other_are_refused() -> None:
    for settings in (
        FloodSettings(),
        FloodSettings(rate=1.0, concurrency=1),
        FloodSettings(rate=1.0, warmup=30.0),
        FloodSettings(rate=1.0, turns=2, endpoint="completions"),
        FloodSettings(rate=100_000.0, duration=3600.0),
    ):
        with pytest.raises(ConfigError):
            settings.check()
    FloodSettings(rate=1.0).check()


def test_a_plot_breaks_its_line_where_a_value_is_missing_and_says_when_there_is_none() -> None:
    line = Line("a", [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0), (4.0, 1.0)], 1)
    svg = plot([line], Axis("s"), Axis("ms"), "<title>")
    (path,) = [part.split('"')[0] for part in svg.split(' d="')[1:]]
    assert path.count("M") == 2 and path.count("L") == 2
    assert "&lt;title&gt;" in svg and "<title>" in svg and "<<" not in svg
    assert "no values" in plot([Line("a", [(1.0, None)], 1)], Axis("s"), Axis("ms"), "empty")
