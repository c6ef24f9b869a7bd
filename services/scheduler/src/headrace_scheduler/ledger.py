"""What one leased worker holds by our reckoning: its blocks, its sequences, and the credit it has yet to be sent."""

from collections.abc import Iterable
from typing import NamedTuple

from headrace_scheduler.blocks import BlockPool
from headrace_scheduler.decisions import Credit, WorkerFacts, WorkerGauges
from headrace_scheduler.prefix_index import block_hash, last_hash
from headrace_scheduler.sequence import Order, OwnedRequest, Rank, Sequence, SequenceState
from headrace_scheduler.stay import NEVER, Stay
from headrace_shared.messages import BlockId, Extension, SequenceId


class PrefixMatch(NamedTuple):
    """What of a sequence's tokens a worker has already computed."""

    block_ids: list[BlockId]
    """Full blocks to share."""
    num_cached: int
    """Leading positions that are valid in these blocks and the copy."""
    copy_from: BlockId | None
    """A sibling's partly filled (or wholly filled, but to be written) block that follows the shared ones."""


class WorkerLedger:
    __slots__ = (
        "_caching",
        "_horizon",
        "accepting",
        "adapters",
        "backlog",
        "credit",
        "evacuates",
        "facts",
        "num_adopted",
        "pool",
        "running",
        "short",
        "stays",
        "trial",
    )

    def __init__(
        self, facts: WorkerFacts, horizon_blocks: int, caching: bool, tables: Iterable[Iterable[BlockId]]
    ) -> None:
        """`tables`: the block tables of all stays that `restore` will tell of."""
        self.facts = facts
        self._horizon = horizon_blocks * facts.block_size
        self._caching = caching
        self.pool = BlockPool(facts.num_blocks, tables)
        self.stays: dict[SequenceId, Stay] = {}
        """Running and releasing ones."""
        self.running: dict[SequenceId, Stay] = {}
        self.num_adopted = 0
        """Of the running ones, at the beginning. They may be more than `max_stays`: who was to make room for others and
        was part of an iteration when our predecessor died, runs beside them."""
        self.short: list[Stay] = []
        """Stays whose horizon falls short; may contain some that run no more."""
        self.backlog = 0
        """Sum of `num_backlog` of the running stays."""
        self.accepting = True
        self.adapters: tuple[str, ...] = ()
        """Digests of those that it has loaded."""
        self.evacuates = False
        """Its sequences go to other workers as soon as they have a place there."""
        self.trial: OwnedRequest | None = None
        """The suspect that this worker is kept for: nobody else runs on it (`suspects.py`)."""
        self.credit = Credit()

    def could_ever_hold(self, request: OwnedRequest) -> bool:
        """One formula with the router's, which refuses prompt + max_tokens > context, where context never exceeds
        num_blocks * block_size: what it lets through always fits an empty pool."""
        facts = self.facts
        return (
            request.num_positions + 1 <= facts.context and self._num_blocks(request.num_positions) <= facts.num_blocks
        )

    def has_adapter_of(self, request: OwnedRequest) -> bool:
        digest = request.request.adapter_digest
        return not digest or digest in self.adapters

    def can_take(self, request: OwnedRequest) -> bool:
        """Were the worker empty."""
        return self.has_adapter_of(request) and self.could_ever_hold(request)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The longest computed prefix, leaving at least one token to compute."""
        size = self.facts.block_size
        num_tokens = sequence.num_tokens
        request = sequence.request
        if sequence.scores_prompt or request.request.embeds:
            return PrefixMatch([], 0, None)
        # max_blocks is of all but the last token, whose logits are needed.
        shared = self.pool.match(sequence.chain(size), (num_tokens - 1) // size) if self._caching else []
        best = PrefixMatch(shared, len(shared) * size, None)
        num_common = min(request.prompt_length, num_tokens - 1)
        if num_common <= best.num_cached:
            return best
        for sibling in request.sequences:
            stay = sibling.stay
            # Safe to copy from: the grant is applied in order, and the sibling is running, so its block can be given
            # to somebody else only by a later grant. If that grant never arrives, no later one is applied either.
            if stay is not None and stay.ledger is self and sibling.state is SequenceState.RUNNING:
                if stay.num_computed < request.prompt_length:
                    continue
                num_full, rest = divmod(num_common, size)
                return PrefixMatch(stay.block_ids[:num_full], num_common, stay.block_ids[num_full] if rest else None)
        return best

    def num_new_blocks(self, sequence: Sequence, match: PrefixMatch) -> int:
        """To allocate at admission: all known tokens plus the horizon, but never more than the sequence can use."""
        return self._target(sequence) - len(match.block_ids)

    def headroom(self, sequence: Sequence) -> int:
        """Free blocks that its admission must leave, so that the running ones can grow before anybody is preempted.

        A sequence that was preempted must leave twice as many each time. Nothing is asked on an empty worker: what fits
        into its pool is admitted.
        """
        if not self.running:
            return 0
        watermark = min(len(self.running), self.facts.num_blocks // 32)
        if sequence.num_preemptions:
            rest = self._num_blocks(sequence.request.num_positions) - self._target(sequence)
            watermark += min(rest, 1 << min(sequence.num_preemptions, 16))
        return watermark

    def start(self, sequence_id: SequenceId, sequence: Sequence, match: PrefixMatch) -> Stay:
        """Takes the blocks of an admission. The caller has checked that they are free."""
        self.pool.share(match.block_ids)
        block_ids = match.block_ids + self.pool.allocate(self.num_new_blocks(sequence, match))
        return self._run(sequence_id, sequence, block_ids, match.num_cached)

    def restore(
        self, sequence_id: SequenceId, sequence: Sequence | None, block_ids: list[BlockId], num_computed: int
    ) -> Stay:
        """A stay from a snapshot, whose table was given at construction. Without a sequence it is releasing."""
        if sequence is None:
            stay = self.stays[sequence_id] = Stay(self, sequence_id, None, block_ids)
            self.pool.give_up(block_ids)
            return stay
        stay = self._run(sequence_id, sequence, block_ids, 0)
        self.num_adopted += 1
        self.advance(stay, num_computed)
        return stay

    def advance(self, stay: Stay, num_computed: int) -> None:
        """Progress of a stay with a sequence, whose new tokens are already in it."""
        before = stay.num_computed
        if num_computed <= before:
            return
        stay.num_computed = num_computed
        if before < stay.known_at_start and stay.sequence_id in self.running:
            self.backlog -= min(num_computed, stay.known_at_start) - before
        if num_computed >= stay.index_at:
            self._index(stay)

    def stop(self, stay: Stay, *, tell: bool) -> None:
        """A running stay gives up its blocks. `tell`: the worker does not know yet."""
        del self.running[stay.sequence_id]
        self.backlog -= stay.num_backlog
        self.pool.give_up(stay.block_ids)
        if tell:
            self.credit.releases.append(stay.sequence_id)

    def confirm(self, stay: Stay) -> None:
        """The worker has released a stay that was stopped."""
        del self.stays[stay.sequence_id]
        self.pool.confirm(stay.block_ids)

    def extend(self) -> list[Stay]:
        """Serves the stays whose horizon falls short, oldest first; returns those to be preempted for it.

        While an older one is not satisfied no younger one gets a block. A sequence preempts younger ones only, and only
        when it is within a block of stalling; blocks on their way back count as had. So the oldest always gets on, and
        the youngest stalls at worst, keeping what it has computed.
        """
        waiting = sorted((stay for stay in self.short if stay.sequence_id in self.running), key=_rank)
        victims: list[Stay] = []
        self.short = []
        for i, stay in enumerate(waiting):
            sequence = stay.sequence
            assert sequence is not None, stay.sequence_id
            if stay.sequence_id not in self.running:
                continue
            need = self._target(sequence) - len(stay.block_ids)
            num_granted = min(need, self.pool.num_free)
            if num_granted > 0:
                block_ids = self.pool.allocate(num_granted)
                stay.block_ids.extend(block_ids)
                self.credit.extensions.append(Extension(stay.sequence_id, tuple(block_ids)))
            if num_granted < need:
                if len(stay.block_ids) * self.facts.block_size - sequence.num_tokens < self.facts.block_size:
                    victims += self._make_room(stay, need - num_granted)
                self.short = [stay for stay in waiting[i:] if stay.sequence_id in self.running]
                break
            self._watch_horizon(stay)
        return victims

    @property
    def max_stays(self) -> int:
        """Most sequences to admit."""
        return most_admitted(self.facts.max_sequences)

    @property
    def has_place(self) -> bool:
        """A new sequence would take part in the next iteration."""
        return len(self.running) < self.facts.max_sequences

    @property
    def num_places(self) -> int:
        """How many more sequences may be admitted, as far as blocks allow."""
        return max(0, self.max_stays - len(self.running)) if self.accepting else 0

    def num_welcome(self) -> int:
        """How many waiting sequences could be admitted soon: by free slots and by blocks, taking the running ones as
        the measure of what a sequence needs, and a quarter of the slots more, so that the next retirement finds one."""
        slots = self.max_stays
        num_each = max(
            1, self.pool.num_referenced // len(self.running) if self.running else self.facts.num_blocks // slots
        )
        return min(slots - len(self.running), self.pool.num_free // num_each) + max(4, self.facts.max_sequences // 4)

    def take_credit(self) -> Credit | None:
        credit = self.credit
        if not (credit.admissions or credit.extensions or credit.releases):
            return None
        self.credit = Credit()
        return credit

    def gauges(self) -> WorkerGauges:
        size = self.facts.block_size
        return WorkerGauges(
            num_blocks=self.facts.num_blocks,
            num_free=self.pool.num_free,
            num_referenced=self.pool.num_referenced,
            num_awaiting=self.pool.num_awaiting,
            num_cached=self.pool.num_indexed,
            num_running=len(self.running),
            num_runnable=sum(
                stay.sequence is not None and stay.sequence.num_tokens <= len(stay.block_ids) * size
                for stay in self.running.values()
            ),
            num_backlog_tokens=self.backlog,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError, with the values, where blocks, stays and counts disagree."""
        assert self.running.keys() <= self.stays.keys(), self.running.keys() - self.stays.keys()
        releasing = [stay for sequence_id, stay in self.stays.items() if sequence_id not in self.running]
        running = list(self.running.values())
        self.pool.check_integrity((stay.block_ids for stay in running), (stay.block_ids for stay in releasing))
        backlog = sum(stay.num_backlog for stay in running)
        assert self.backlog == backlog, (self.backlog, backlog)
        writable: set[BlockId] = set()
        full: set[BlockId] = set()
        for stay in self.stays.values():
            num_full = stay.num_computed // self.facts.block_size
            if stay.sequence is not None:
                full.update(stay.block_ids[:num_full])
                tail = stay.block_ids[num_full:]
                assert not writable.intersection(tail), (stay.sequence_id, tail)
                writable.update(tail)
        assert not writable & full, ("a block that may be written is shared", writable & full)
        for stay in running:
            sequence = stay.sequence
            assert sequence is not None and sequence.stay is stay, stay.sequence_id
            assert sequence.state is SequenceState.RUNNING, (stay.sequence_id, sequence.state)
            assert len(stay.block_ids) <= self._num_blocks(sequence.request.num_positions), stay.block_ids
            assert stay.num_computed <= sequence.num_tokens, (stay.num_computed, sequence.num_tokens)
            assert self.trial is None or sequence.request is self.trial, "somebody runs beside a suspect on trial"
        assert len(running) <= max(self.max_stays, self.num_adopted), (len(running), self.facts)

    def _num_blocks(self, num_positions: int) -> int:
        return -(-num_positions // self.facts.block_size)

    def _target(self, sequence: Sequence) -> int:
        return self._num_blocks(min(sequence.num_tokens + self._horizon, sequence.request.num_positions))

    def _run(self, sequence_id: SequenceId, sequence: Sequence, block_ids: list[BlockId], num_cached: int) -> Stay:
        size = self.facts.block_size
        stay = self.stays[sequence_id] = self.running[sequence_id] = Stay(self, sequence_id, sequence, block_ids)
        stay.known_at_start = sequence.num_tokens
        stay.num_computed = num_cached
        if self._caching:
            stay.chain = sequence.chain(size)
            stay.num_indexed = num_cached // size
            stay.parent = last_hash(sequence.request.root(size), stay.chain, stay.num_indexed)
            stay.index_at = (stay.num_indexed + 1) * size
        self.backlog += stay.num_backlog
        self._watch_horizon(stay)
        return stay

    def _watch_horizon(self, stay: Stay) -> None:
        sequence = stay.sequence
        assert sequence is not None, stay.sequence_id
        capacity = len(stay.block_ids) * self.facts.block_size
        stay.extend_at = NEVER
        if capacity < sequence.request.num_positions:
            stay.extend_at = capacity - self._horizon + 1
            if sequence.num_tokens >= stay.extend_at:
                self.note_short(stay)

    def note_short(self, stay: Stay) -> None:
        stay.extend_at = NEVER
        self.short.append(stay)

    def _index(self, stay: Stay) -> None:
        """Makes the blocks known that have become full and computed: never sooner, for a reader could overtake the
        iteration that writes them."""
        sequence = stay.sequence
        assert sequence is not None and stay.parent is not None, stay.sequence_id
        size = self.facts.block_size
        num_full = min(min(stay.num_computed, sequence.num_tokens) // size, len(stay.block_ids))
        for i in range(stay.num_indexed, num_full):
            if i < len(stay.chain):
                stay.parent = stay.chain[i]
            else:
                stay.parent = block_hash(stay.parent, sequence.packed(i * size, (i + 1) * size))
            self.pool.index(stay.block_ids[i], stay.parent)
        stay.num_indexed = max(num_full, stay.num_indexed)
        stay.index_at = (stay.num_indexed + 1) * size

    def _make_room(self, needy: Stay, num_blocks: int) -> list[Stay]:
        """Stops sequences that come behind the needy one, until enough blocks are on their way back."""
        victims: list[Stay] = []
        rank = _rank(needy)
        candidates = [(_sacrifice(stay), stay) for stay in self.running.values() if _rank(stay) > rank]
        candidates.sort(key=lambda pair: pair[0])
        while self.pool.num_awaiting < num_blocks and candidates:
            _, victim = candidates.pop()
            self.stop(victim, tell=True)
            victims.append(victim)
        return victims


def _rank(stay: Stay) -> Rank:
    assert stay.sequence is not None, stay.sequence_id
    return stay.sequence.rank


def _sacrifice(stay: Stay) -> tuple[int, bool, Order]:
    assert stay.sequence is not None, stay.sequence_id
    return stay.sequence.sacrifice


def most_admitted(max_sequences: int) -> int:
    """An eighth more than take part in an iteration, so that one that retires is followed by another at once, however
    long the news of it travels (D14)."""
    return max_sequences + max_sequences // 8
