import numpy as np

from headrace_simulator.diurnal import DAY_S, MEAN_ANSWER, MEAN_PROMPT, Day


def test_every_policy_gets_the_same_day() -> None:
    one, other = (Day(50, step_s=1, seed=3) for _ in range(2))
    assert [one.rate(step) for step in range(0, 86_400, 977)] == [other.rate(step) for step in range(0, 86_400, 977)]
    backwards = [other.arrivals(step) for step in reversed(range(100))][::-1]
    for step in range(100):
        assert np.array_equal(one.arrivals(step).prompts, backwards[step].prompts)
        assert np.array_equal(one.arrivals(step).answers, backwards[step].answers)
    assert Day(50, step_s=1, seed=4).rate(500) != one.rate(500)


def test_a_day_is_quiet_at_night_busy_in_the_afternoon_and_peaks_at_what_was_asked_for() -> None:
    day = Day(1000, step_s=10)
    rates = np.array([day.rate(step) for step in range(day.num_steps)])
    assert day.num_steps * 10 == DAY_S
    night, afternoon = rates[3 * 360 : 5 * 360].mean(), rates[14 * 360 : 16 * 360].mean()
    assert night < 0.2 * afternoon
    assert 900 < rates.max() < 1150
    assert 0.4 < rates.mean() / 1000 < 0.55


def test_a_surge_comes_within_minutes() -> None:
    day = Day(1000, step_s=10)
    at = int(20.7 * 360)
    assert day.rate(at + 20) > 1.25 * day.rate(at - 6)
    assert day.rate(at + 70) < 0.85 * day.rate(at + 20)


def test_lengths_have_their_means_and_bounds() -> None:
    day = Day(1000, step_s=10, steady=True, max_per_step=1 << 30)
    batch = day.arrivals(0)
    assert abs(batch.num / 10_000 - 1) < 0.05
    assert abs(batch.prompts.mean() / MEAN_PROMPT - 1) < 0.05 and abs(batch.answers.mean() / MEAN_ANSWER - 1) < 0.1
    assert batch.prompts.min() >= 1 and batch.answers.min() >= 1


def test_more_than_can_be_simulated_singly_stands_for_several() -> None:
    day = Day(10_000, step_s=1, max_per_step=500, steady=True)
    assert day.weight == 20
    counts = [day.arrivals(step).num for step in range(100)]
    assert max(counts) < 700 and abs(np.mean(counts) * day.weight / 10_000 - 1) < 0.05
