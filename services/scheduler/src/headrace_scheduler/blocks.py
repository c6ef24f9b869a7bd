"""The KV blocks of one worker: who holds them, and which hold a known prefix.

    free ──allocate──> referenced ──give_up──> awaiting ──confirm──> free
      ^  └──share───>      ^   (by the last holder)  │
      │                    └───────share─────────────┘

Each holder counts twice over its life: as a reference while its sequence runs, then as an await until the worker
confirms that no iteration in flight can write the block. A block with any reference is referenced; without one but
awaited by somebody it is awaiting; else it is free (I1). A free block that is still in the prefix index is cached: it
can be shared again, or evicted, longest unused first. Every operation is O(1) for each block it touches.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from headrace_scheduler.prefix_index import BlockHash
from headrace_shared.messages import BlockId


class BlockPool:
    """`tables`: block tables that already hold blocks, each counted as one reference (adoption)."""

    __slots__ = (
        "_blank",
        "_cached",
        "_hash_of",
        "_index",
        "_num_awaits",
        "_num_refs",
        "num_awaiting",
        "num_blocks",
        "num_referenced",
    )

    def __init__(self, num_blocks: int, tables: Iterable[Iterable[BlockId]] = ()) -> None:
        self.num_blocks = num_blocks
        self.num_referenced = 0
        self.num_awaiting = 0
        self._num_refs = [0] * num_blocks
        self._num_awaits = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._index: dict[BlockHash, BlockId] = {}
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        """Free and in the index, longest unused first."""
        for table in tables:
            for block_id in table:
                self.num_referenced += self._num_refs[block_id] == 0
                self._num_refs[block_id] += 1
        self._blank = [BlockId(i) for i in reversed(range(num_blocks)) if self._num_refs[i] == 0]
        """Free and not in the index; the next one last."""

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_indexed(self) -> int:
        return len(self._index)

    def match(self, chain: Sequence[BlockHash], max_blocks: int) -> list[BlockId]:
        """The indexed blocks of the longest prefix of `chain`, at most `max_blocks`. Takes no reference."""
        block_ids: list[BlockId] = []
        for i in range(min(max_blocks, len(chain))):
            block_id = self._index.get(chain[i])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def count_free(self, block_ids: Iterable[BlockId]) -> int:
        """How many of them are free: sharing these takes as many away from allocation."""
        return sum(block_id in self._cached for block_id in block_ids)

    def count_sole(self, block_ids: Iterable[BlockId]) -> int:
        """How many of them have one holder: as many come back if that one gives them up."""
        return sum(self._num_refs[block_id] == 1 for block_id in block_ids)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Takes free blocks, evicting cached ones if need be. The caller has checked `num_free`."""
        assert 0 <= num_blocks <= self.num_free, (num_blocks, self.num_free)
        block_ids: list[BlockId] = []
        for _ in range(num_blocks):
            block_id = self._blank.pop() if self._blank else self._evict()
            self._num_refs[block_id] = 1
            block_ids.append(block_id)
        self.num_referenced += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """One more reference each. They must be full and computed: nobody writes them again, whatever is in flight."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                if self._num_awaits[block_id]:
                    self.num_awaiting -= 1
                else:
                    del self._cached[block_id]
                self.num_referenced += 1
            self._num_refs[block_id] += 1

    def give_up(self, block_ids: Iterable[BlockId]) -> None:
        """A holder's references become awaited."""
        for block_id in block_ids:
            assert self._num_refs[block_id] > 0, block_id
            self._num_refs[block_id] -= 1
            self._num_awaits[block_id] += 1
            if self._num_refs[block_id] == 0:
                self.num_referenced -= 1
                self.num_awaiting += 1

    def confirm(self, block_ids: Sequence[BlockId]) -> None:
        """The worker has released the blocks of a holder that gave them up."""
        # Backwards, so that of a prefix its end is evicted first: the start without the end is useful, not the reverse.
        for block_id in reversed(block_ids):
            assert self._num_awaits[block_id] > 0, block_id
            self._num_awaits[block_id] -= 1
            if self._num_awaits[block_id] == 0 and self._num_refs[block_id] == 0:
                self.num_awaiting -= 1
                if self._hash_of[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def index(self, block_id: BlockId, content: BlockHash) -> None:
        """Makes a held, full and computed block known by its content. Of equal blocks the first stays known."""
        if content not in self._index and self._hash_of[block_id] is None:
            self._index[content] = block_id
            self._hash_of[block_id] = content

    def check_integrity(self, referenced: Iterable[Iterable[BlockId]], awaited: Iterable[Iterable[BlockId]]) -> None:
        """Raises AssertionError unless the counts are those of these block tables, and every block is accounted for."""
        num_refs = Counter(block_id for table in referenced for block_id in table)
        num_awaits = Counter(block_id for table in awaited for block_id in table)
        for i in range(self.num_blocks):
            block_id = BlockId(i)
            actual = (self._num_refs[i], self._num_awaits[i])
            assert actual == (num_refs[block_id], num_awaits[block_id]), (i, actual, num_refs[block_id])
        free = set(self._blank) | set(self._cached)
        assert len(free) == self.num_free, "a block is free twice"
        in_use = set(num_refs) | set(num_awaits)
        assert not free & in_use, free & in_use
        assert self.num_referenced == len(num_refs), (self.num_referenced, len(num_refs))
        assert self.num_awaiting == len(set(num_awaits) - set(num_refs)), self.num_awaiting
        total = self.num_free + self.num_referenced + self.num_awaiting
        assert total == self.num_blocks, (self.num_free, self.num_referenced, self.num_awaiting, self.num_blocks)
        hashed = {i for i, content in enumerate(self._hash_of) if content is not None}
        assert hashed == set(self._index.values()), hashed ^ set(self._index.values())
        assert len(hashed) == len(self._index), "two hashes name one block"
        assert set(self._cached) == hashed - in_use, set(self._cached) ^ (hashed - in_use)

    def _evict(self) -> BlockId:
        block_id, _ = self._cached.popitem(last=False)
        content = self._hash_of[block_id]
        assert content is not None, block_id
        del self._index[content]
        self._hash_of[block_id] = None
        return block_id
