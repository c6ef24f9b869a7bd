"""Who gets in, in virtual time: nobody is refused, or the router decides."""

from typing import NamedTuple, Protocol

from headrace_router.forecast import Capacity, Forecast, Mix, make_forecast
from headrace_router.queue_limits import Depth, QueueLimits, judge
from headrace_shared.engine_speed import EngineSpeed
from headrace_shared.fleet_messages import RunningGroup, WaitingGroup
from headrace_simulator.cluster import Load
from headrace_simulator.workers import WorkerKind
from headrace_worker.timing.roofline import OVERHEAD_S

NUM_GROUPS = 8
"""In which routers tell each other what waits and runs."""
LONG = 4.0
"""An answer that is longer than most, in mean answers."""
MARGIN = 1.5
"""What a router takes an expected time times for, before it has learnt how well it guesses."""
NO_LIMIT = 1 << 60


class Coming(NamedTuple):
    num_ready: int
    in_s: tuple[float, ...]
    """Seconds until each further worker is ready."""


class Gate(Protocol):
    def admit(self, num_arrived: int, load: Load, workers: Coming) -> int:
        """How many of the requests that come in this step get in, the first ones; the others are shed."""
        ...


class Open:
    """Everybody gets in and waits as long as it takes."""

    def admit(self, num_arrived: int, load: Load, workers: Coming) -> int:
        return num_arrived


class RouterGate:
    """The router's own forecast and judgement, unchanged. Where nothing waits and a worker is there nobody is asked."""

    def __init__(
        self,
        kind: WorkerKind,
        *,
        mean_prompt: float,
        mean_answer: float,
        weight: int,
        max_wait_s: float,
    ) -> None:
        self._kind = kind
        self._mix = Mix(mean_prompt, mean_answer)
        self._weight = weight
        self._limits = QueueLimits(NO_LIMIT, NO_LIMIT, max_wait_s)
        roofline = kind.roofline
        self._speed = EngineSpeed(
            OVERHEAD_S + roofline.weight_bytes / roofline.bandwidth,
            (mean_prompt + mean_answer) * roofline.shape.kv_bytes_per_token() / roofline.bandwidth,
            2 * roofline.shape.num_parameters / roofline.flops,
        )

    def admit(self, num_arrived: int, load: Load, workers: Coming) -> int:
        if not load.num_waiting and workers.num_ready:
            return num_arrived
        facts = self._kind.facts
        capacity = Capacity(
            workers.num_ready, facts.max_sequences, facts.tokens_per_iteration, self._speed, workers.in_s
        )
        forecast = make_forecast(self._waiting(load), self._running(load), capacity, self._mix)
        if forecast is None:
            return num_arrived  # nobody knows anything: as the router, let it wait
        # Who comes later waits longer, so the first that is refused is found by halving.
        low, high = 0, num_arrived
        while low < high:
            middle = (low + high + 1) // 2
            if self._gets_in(forecast, load, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _gets_in(self, forecast: Forecast, load: Load, number: int) -> bool:
        mix, weight = self._mix, self._weight
        num_added = (number - 1) * weight
        key = forecast.order.key_of_newcomer(0, "", 1.0, mix.prompt_tokens + mix.output_tokens)
        answer = mix.output_tokens
        estimate = forecast.newcomer(key, num_added, mix.prompt_tokens, answer, LONG * answer)
        num_waiting = load.num_waiting * weight + num_added
        refusal = judge(
            estimate,
            Depth(num_waiting, num_waiting * (mix.prompt_tokens + answer)),
            Depth(1, mix.prompt_tokens + answer),
            self._limits,
            left_s=float("inf"),
            margin=MARGIN,
            spacing_s=forecast.spacing_s,
            is_returning=False,
        )
        return refusal is None

    def _waiting(self, load: Load) -> list[WaitingGroup]:
        return [
            WaitingGroup(
                0, group, size, size, round(size * self._mix.prompt_tokens), round(size * self._mix.output_tokens)
            )
            for group, size in enumerate(_dealt_out(load.num_waiting * self._weight))
            if size
        ]

    def _running(self, load: Load) -> list[RunningGroup]:
        """As if all answers were of the mean length, and begun evenly."""
        left = self._mix.output_tokens / NUM_GROUPS
        return [
            RunningGroup(size, max(1, round(left * (group + 0.5))))
            for group, size in enumerate(_dealt_out(load.num_running * self._weight))
            if size
        ]


def _dealt_out(total: int) -> list[int]:
    """To the groups, as evenly as can be."""
    return [total * (group + 1) // NUM_GROUPS - total * group // NUM_GROUPS for group in range(NUM_GROUPS)]
