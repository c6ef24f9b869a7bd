"""A fleet of workers as one: every ready worker carries the same load. For a day of a thousand GPUs.

Each request has lengths, a wait and a time to first token of its own; only the placement is left out, which spreads the
load so evenly that workers are alike (the limit of choosing the least loaded of many). In each step

- requests leave one queue, first come first served, for the free places and the free KV memory;
- prompts are computed in chunks beside the decoding, at the iteration times of the roofline. A prompt also waits for
  others when the fleet is busy: by chance, as in a queue with as many servers as workers (Sakasegawa, 1977), and for
  what the last step left undone;
- all running sequences decode in step: a common clock counts the iterations, and a sequence is over when it has ticked
  as often as its answer has tokens. Ends are thus counted in a ring over that clock, not looked for;
- workers that go hand over what they run: it is computed again elsewhere.

Where single tokens, messages and blocks matter, `token_level` simulates all of them; `headrace simulate --check`
compares the two.
"""

from collections import defaultdict, deque
from math import exp, sqrt

import numpy as np

from headrace_shared.engine_speed import Work
from headrace_simulator.arrivals import Arrivals, Floats, Ints
from headrace_simulator.cluster import Load, Step
from headrace_simulator.workers import WorkerKind
from headrace_worker.timing.roofline import OVERHEAD_S
from headrace_worker.timing.roofline import Work as Iteration

SMOOTHING_S = 10.0
IDLE = Work(0.0, 0.0, 0.0, 0.0)
KV_LIMIT = 0.95
"""Of the KV memory; the rest is kept for those that run."""


class MeanField:
    def __init__(self, kind: WorkerKind, *, step_s: float, weight: int, max_answer: int, seed: int = 0) -> None:
        self._kind = kind
        self._step_s = step_s
        self._weight = weight
        self._random = np.random.default_rng((seed, 1 << 41))
        self._queue: deque[tuple[float, Arrivals]] = deque()
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._num_ready = 0
        self._starting: defaultdict[int, list[Arrivals]] = defaultdict(list)
        """Step -> requests whose first token comes then."""
        self._num_starting = 0
        self._backlog = 0.0
        """Prompt tokens that were admitted and not computed."""
        self._clock = 0.0
        """Iterations that each running sequence has taken part in."""
        self._ends: Ints = np.zeros(1 << (2 * max_answer).bit_length(), np.int64)
        self._end_offsets: Floats = np.zeros(len(self._ends))
        self._num_decoding = 0
        self._num_ended = 0
        """In the last step."""
        self._offsets = 0.0
        """Of those that decode, the sum of prompt minus clock at the start. Each holds that plus the clock now."""
        self._held_starting = 0.0
        """Tokens of those that wait for their first token."""
        self._prompt_rate = 0.0
        """Prompt tokens a second, of late."""
        self._mean_prompt = 0.0
        self._prompt_square = 0.0
        """Mean of the squares over square of the mean."""
        self._spent = IDLE
        self._utilization = 0.0

    def step(self, now: float, num_ready: int, arrivals: Arrivals) -> Step:
        self._scale(num_ready)
        if arrivals.num:
            self._queue.append((now, arrivals))
            self._num_waiting += arrivals.num
            self._num_waiting_tokens += int(arrivals.prompts.sum())
        if not num_ready:
            self._spent, self._utilization = IDLE, 0.0
            return Step(np.empty(0), 0)
        waits, admitted = self._admit(now)
        ttft_s = self._first_tokens(now, waits, admitted)
        self._begin(now)
        return Step(ttft_s, self._compute())

    def load(self, now: float) -> Load:
        capacity = max(1, self._num_ready)
        num_running = self._num_decoding + self._num_starting
        return Load(
            num_waiting=self._num_waiting,
            num_running=num_running,
            num_waiting_tokens=self._num_waiting_tokens,
            oldest_wait_s=max(0.0, now - self._queue[0][0]) if self._queue else 0.0,
            kv_use=min(1.0, self._held * self._weight / (capacity * self._kind.kv_tokens)),
            batch_occupancy=min(1.0, num_running * self._weight / (capacity * self._kind.facts.max_sequences)),
            spent=self._spent,
            utilization=self._utilization,
        )

    @property
    def _held(self) -> float:
        """Tokens in the cache."""
        return self._held_starting + self._offsets + self._num_decoding * self._clock

    def _scale(self, num_ready: int) -> None:
        if num_ready < self._num_ready:
            self._backlog += self._held * (self._num_ready - num_ready) / self._num_ready
        self._num_ready = num_ready

    def _admit(self, now: float) -> tuple[Floats, Arrivals]:
        """How long each admitted request has waited, and the requests."""
        places = self._num_ready * self._kind.places // self._weight - self._num_decoding - self._num_starting
        places += self._num_ended  # about as many become free within this step
        room = KV_LIMIT * self._num_ready * self._kind.kv_tokens / self._weight - self._held
        waits: list[Floats] = []
        taken: list[Arrivals] = []
        while self._queue and places > 0 and room > 0:
            came, batch = self._queue.popleft()
            needed = np.cumsum(batch.prompts)
            count = min(places, int(np.searchsorted(needed, room, side="right")), batch.num)
            if not count and not taken and not self._num_decoding + self._num_starting:
                count = 1  # alone it gets all there is; else nothing would ever move again
            if count:
                part = Arrivals(batch.prompts[:count], batch.answers[:count])
                taken.append(part)
                waits.append(np.full(count, max(0.0, now - came)))
                places -= count
                room -= float(needed[count - 1])
                self._held_starting += float(needed[count - 1])
                self._num_waiting -= count
                self._num_waiting_tokens -= int(needed[count - 1])
            if count < batch.num:
                self._queue.appendleft((came, Arrivals(batch.prompts[count:], batch.answers[count:])))
                break
        if not taken:
            return np.empty(0), Arrivals(np.empty(0, np.int64), np.empty(0, np.int64))
        prompts = np.concatenate([each.prompts for each in taken])
        return np.concatenate(waits), Arrivals(prompts, np.concatenate([each.answers for each in taken]))

    def _first_tokens(self, now: float, waits: Floats, admitted: Arrivals) -> Floats:
        count = admitted.num
        self._note_prompts(admitted.prompts)
        if not count:
            return np.empty(0)
        roofline, facts = self._kind.roofline, self._kind.facts
        running = self._num_decoding * self._weight / self._num_ready
        decode_s, mixed_s, chunk = self._iterations(running)
        rate = chunk / mixed_s
        flops_per_token = 2 * roofline.shape.num_parameters / roofline.flops
        alone = OVERHEAD_S + flops_per_token * (running + np.minimum(admitted.prompts, chunk))
        own = np.maximum(alone, decode_s) * roofline.slowdown
        own += (admitted.prompts // facts.tokens_per_iteration) * mixed_s * (admitted.prompts > chunk)
        left_over_s = self._backlog * self._weight / (self._num_ready * rate)
        ahead = self._chance_waits(count, rate) + self._random.random(count) * decode_s
        after_admission = ahead + left_over_s + own
        self._backlog += float(admitted.prompts.sum())
        self._num_starting += count
        steps = ((now + self._random.random(count) * self._step_s + after_admission) / self._step_s).astype(np.int64)
        for at in np.unique(steps):
            chosen = steps == at
            self._starting[int(at)].append(Arrivals(admitted.prompts[chosen], admitted.answers[chosen]))
        return np.asarray(waits + after_admission)

    def _note_prompts(self, prompts: Ints) -> None:
        part = 1 - exp(-self._step_s / SMOOTHING_S)
        self._prompt_rate += (float(prompts.sum()) / self._step_s - self._prompt_rate) * part
        if len(prompts):
            mean = float(prompts.mean())
            square = float((prompts.astype(np.float64) ** 2).mean()) / mean**2
            part = part if self._mean_prompt else 1.0
            self._mean_prompt += (mean - self._mean_prompt) * part
            self._prompt_square += (square - self._prompt_square) * part

    def _chance_waits(self, count: int, rate: float) -> Floats:
        """Waits for prompts that happen to be ahead, of a queue with as many servers as workers, each computing `rate`
        tokens a second. The mean is Sakasegawa's approximation for M/G/m; those that wait do so exponentially."""
        servers = self._num_ready
        busy = min(0.995, self._prompt_rate * self._weight / (servers * rate))
        if busy <= 0:
            return np.zeros(count)
        power = sqrt(2 * (servers + 1)) - 1
        chance = busy**power
        mean_s = self._mean_prompt / rate * self._prompt_square / 2 / (servers * (1 - busy))
        return np.where(self._random.random(count) < chance, self._random.exponential(mean_s, count), 0.0)

    def _mean_held(self) -> float:
        running = self._num_decoding + self._num_starting
        return self._held / running if running else 0.0

    def _begin(self, now: float) -> None:
        """Requests whose first token has come decode from now on."""
        step = int(now / self._step_s + 0.5)
        due = [at for at in self._starting if at <= step]
        for batch in [each for at in due for each in self._starting.pop(at)]:
            ends = np.ceil(self._clock + batch.answers).astype(np.int64) % len(self._ends)
            np.add.at(self._ends, ends, 1)
            offsets = batch.prompts - self._clock
            np.add.at(self._end_offsets, ends, offsets)
            self._offsets += float(offsets.sum())
            self._held_starting -= float(batch.prompts.sum())
            self._num_decoding += batch.num
            self._num_starting -= batch.num

    def _iterations(self, running: float) -> tuple[float, float, float]:
        """Of a worker with so many sequences: how long an iteration takes that only decodes, how long one that is
        filled up with prompt, and with how many tokens of it."""
        facts, roofline = self._kind.facts, self._kind.roofline
        mean = self._mean_held()
        running = min(running, facts.max_sequences)
        held = int(running * mean)
        chunk = max(1.0, facts.tokens_per_iteration - running)
        decode_s = roofline.iteration_s(Iteration(int(running), held, held))
        filled = Iteration(int(running + chunk), held + chunk * mean / 2, held + int(mean))
        return decode_s, roofline.iteration_s(filled), chunk

    def _compute(self) -> int:
        """Runs the iterations of a step; returns how many requests ended."""
        running = self._num_decoding * self._weight / self._num_ready
        decode_s, mixed_s, chunk = self._iterations(running)
        backlog = self._backlog * self._weight / self._num_ready
        num_mixed = min(backlog / chunk, self._step_s / mixed_s)
        left_s = self._step_s - num_mixed * mixed_s
        ticks = num_mixed + (left_s / decode_s if running else 0.0)
        # Places that more sequences hold than take part in an iteration come in turns.
        ticks *= min(1.0, self._kind.facts.max_sequences / running) if running else 1.0
        self._backlog = max(0.0, self._backlog - num_mixed * chunk * self._num_ready / self._weight)
        busy_s = self._step_s if running else num_mixed * mixed_s
        num_iterations = num_mixed + (left_s / decode_s if running else 0.0)
        self._spent = Work(busy_s, num_iterations, ticks * running, num_mixed * chunk)
        self._utilization = busy_s / self._step_s
        before, self._clock = self._clock, self._clock + ticks
        passed = np.arange(int(before) + 1, int(self._clock) + 1) % len(self._ends)
        num_ended = int(self._ends[passed].sum())
        self._offsets -= float(self._end_offsets[passed].sum())
        self._ends[passed] = 0
        self._end_offsets[passed] = 0.0
        self._num_decoding -= num_ended
        self._num_ended = num_ended
        if not self._num_decoding:
            self._offsets = 0.0  # what rounding has left
        return num_ended
