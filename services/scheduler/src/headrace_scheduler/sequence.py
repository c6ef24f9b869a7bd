"""One request and its choices, each a sequence of tokens, wherever they are. Owns their states; knows no blocks.

A sequence is prompt + output. It has no prefill or decode phase: the worker's `num_computed` catches up with that.
The time it spends on one worker under one id is a `Stay` (`stay.py`).
"""

from array import array
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from headrace_scheduler.fairness import TenantShare, level_of
from headrace_scheduler.prefix_index import TOKEN_BYTES, BlockHash, extend_chain, last_hash, root_hash
from headrace_shared.codec import pack_ids
from headrace_shared.messages import Outcome, Request, WorkerId

if TYPE_CHECKING:
    from headrace_scheduler.stay import Stay


class SequenceState(Enum):
    UNKNOWN = "unknown"
    """Only the token log knows what became of it: a sibling was adopted, or it has lost its worker."""
    PARKED = "parked"
    """A sibling computes the prompt, or is about to; then this one can share its blocks."""
    WAITING = "waiting"
    """For a worker, for the first time or again."""
    RUNNING = "running"
    """Admitted to a worker."""
    ENDED = "ended"


_UNKNOWN, _PARKED, _WAITING, _RUNNING, _ENDED = SequenceState

TRANSITIONS: Mapping[SequenceState, frozenset[SequenceState]] = {
    _UNKNOWN: frozenset({_PARKED, _WAITING, _RUNNING, _ENDED}),
    _PARKED: frozenset({_UNKNOWN, _WAITING, _RUNNING, _ENDED}),
    _WAITING: frozenset({_UNKNOWN, _PARKED, _RUNNING, _ENDED}),
    _RUNNING: frozenset({_UNKNOWN, _WAITING, _ENDED}),
    _ENDED: frozenset(),
}

SUSPECT_AT = 4
"""Losses that weigh so much make a request a suspect."""

Order = tuple[int, int, int]
"""Stream sequence, arrival here, choice: the order of first arrival, the same for every scheduler."""
Rank = tuple[int, Order]


class Sequence:
    """One choice of a request. `state` changes only through `to`."""

    __slots__ = (
        "at_level_since",
        "choice",
        "goal",
        "last_attempt",
        "level",
        "next_attempt",
        "num_bypassed",
        "num_displaced",
        "num_preemptions",
        "order",
        "outcome",
        "output",
        "request",
        "state",
        "stay",
        "waiting_since",
    )

    def __init__(self, request: "OwnedRequest", choice: int, state: SequenceState, base_attempt: int) -> None:
        self.request = request
        self.choice = choice
        self.order: Order = (request.stream_sequence, request.arrival, choice)
        self.state = state
        self.output = array("I")
        """Token ids generated so far, over all attempts."""
        self.next_attempt = base_attempt
        self.last_attempt: int | None = None
        """Of the latest admission that is known; None if none is."""
        self.stay: Stay | None = None
        """The latest one, until the worker confirms its release: late progress of a preempted stay still counts."""
        self.outcome: Outcome | None = None
        self.goal = 0
        """Length of the output that acquits it (`suspects.py`)."""
        self.level = level_of(request.request)
        """Its class. Rises with long waits."""
        self.at_level_since = 0.0
        """Monotonic seconds; while it waits."""
        self.num_displaced = 0
        """Times that it was taken off its worker for somebody who goes before it."""
        self.num_preemptions = 0
        self.num_bypassed = 0
        """Younger sequences that were admitted while this one, the oldest that did not fit, was waiting."""
        self.waiting_since = 0.0
        """Monotonic seconds; of the present or last wait."""

    def to(self, state: SequenceState) -> None:
        """Raises AssertionError, and changes nothing, if TRANSITIONS has no such move."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(
                f"{self.state} -> {state} of choice {self.choice} of {self.request.request.request_id}"
            )
        self.state = state

    @property
    def base_level(self) -> int:
        """Its class without what it has gained by waiting."""
        return level_of(self.request.request)

    @property
    def rank(self) -> Rank:
        """Of two that run on one worker the lower one is served first, and only the higher one ever gives way."""
        return -self.level, self.order

    @property
    def sacrifice(self) -> tuple[int, bool, Order]:
        """Of those that may give way the highest does: of the lowest class, of a tenant with more than its share, and
        of these the youngest, which has the least to lose."""
        return -self.level, self.request.share.is_above, self.order

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_length + len(self.output)

    @property
    def is_complete(self) -> bool:
        """All tokens that were asked for are there, whether or not anybody told us of the finish."""
        return len(self.output) >= self.request.request.stop.max_tokens

    @property
    def is_leaving(self) -> bool:
        """It was stopped, but its worker has not confirmed that yet, and may have sampled more tokens of it."""
        return self.stay is not None and self.state is not SequenceState.RUNNING

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of the whole prompt are wanted of it, and for those all of it must be computed."""
        wanted = self.request.request.sampling.num_prompt_logprobs
        return wanted is not None and self.choice == 0 and not self.output

    def begin_attempt(self, attempt: int) -> None:
        self.last_attempt = attempt
        self.next_attempt = max(self.next_attempt, attempt + 1)

    def packed(self, start: int, stop: int) -> bytes:
        """The packed ids of positions [start, stop)."""
        prompt_length = self.request.prompt_length
        packed = self.request.request.prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        if stop > prompt_length:
            packed += pack_ids(self.output[max(0, start - prompt_length) : stop - prompt_length])
        return packed

    def chain(self, block_size: int) -> list[BlockHash]:
        """The hashes of all full blocks of the known tokens. Not to be changed: it may be the request's own."""
        chain = self.request.prompt_chain(block_size)
        if not self.output:
            return chain
        parent = last_hash(self.request.root(block_size), chain, len(chain))
        rest = self.packed(len(chain) * block_size, self.num_tokens)
        return chain + extend_chain(parent, rest, block_size)


class OwnedRequest:
    """A request that we hold the queue message of, until its terminal event."""

    __slots__ = (
        "_chains",
        "_roots",
        "ack_subject",
        "arrival",
        "code",
        "detail",
        "is_dead",
        "is_recorded",
        "loss_reasons",
        "message",
        "num_acquittals",
        "num_losses",
        "num_open",
        "num_positions",
        "prompt_length",
        "request",
        "sequences",
        "share",
        "stream_sequence",
        "suspected_in",
        "suspicion",
    )

    def __init__(
        self,
        request: Request,
        ack_subject: str,
        stream_sequence: int,
        arrival: int,
        base_attempt: int,
        share: TenantShare,
    ) -> None:
        """`arrival`: a number that rises with each request. All choices start in state UNKNOWN."""
        self.request = request
        self.share = share
        """Its tenant's."""
        self.ack_subject = ack_subject
        self.stream_sequence = stream_sequence
        self.arrival = arrival
        self.prompt_length = len(request.prompt) // TOKEN_BYTES
        self.num_positions = self.prompt_length + request.stop.max_tokens - 1
        """Most positions that are ever computed: the last token's keys and values are not needed."""
        self.num_losses = 0
        """Workers that were lost with it on board."""
        self.suspicion = 0
        """What these losses weigh against it, since it was last acquitted."""
        self.suspected_in: tuple[WorkerId, ...] = ()
        """The workers that were lost since then, as far as this process has seen it."""
        self.num_acquittals = 0
        self.loss_reasons: tuple[str, ...] = ()
        """Of the latest losses, oldest first."""
        self.is_recorded = True
        """Its losses are where a successor of ours will find them: it may touch another worker."""
        self.is_dead = False
        """It ends because it was given up."""
        self.code = ""
        self.message = ""
        self.detail = ""
        self._roots: dict[int, BlockHash] = {}
        self._chains: dict[int, list[BlockHash]] = {}
        """By block size: of the prompt, computed once."""
        self.num_open = request.num_choices
        self.sequences = [
            Sequence(self, choice, SequenceState.UNKNOWN, base_attempt) for choice in range(request.num_choices)
        ]

    @property
    def is_suspect(self) -> bool:
        """It runs alone, or not at all."""
        return self.suspicion >= SUSPECT_AT

    @property
    def num_generated(self) -> int:
        return sum(len(sequence.output) for sequence in self.sequences)

    def root(self, block_size: int) -> BlockHash:
        root = self._roots.get(block_size)
        if root is None:
            request = self.request
            root = root_hash(request.model, request.cache_salt, block_size, request.adapter_digest)
            self._roots[block_size] = root
        return root

    def prompt_chain(self, block_size: int) -> list[BlockHash]:
        chain = self._chains.get(block_size)
        if chain is None:
            chain = extend_chain(self.root(block_size), self.request.prompt, block_size)
            self._chains[block_size] = chain
        return chain

    def in_state(self, state: SequenceState) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is state]

    def outcome(self) -> Outcome:
        """The worst of the choices' outcomes."""
        outcomes: Iterable[Outcome | None] = {sequence.outcome for sequence in self.sequences}
        for outcome in (Outcome.FAILED, Outcome.EXPIRED, Outcome.SHED, Outcome.CANCELLED):
            if outcome in outcomes:
                return outcome
        return Outcome.FINISHED
