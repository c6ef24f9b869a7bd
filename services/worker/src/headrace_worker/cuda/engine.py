"""The engine of an asynchronous device. See `iteration.Engine` for its contract.

`submit` only queues work: one upload, the forward pass, sampling, one download. A token that the iteration before is
still sampling is read on the device. `collect` waits for the download of the oldest iteration and for nothing else, so
with one iteration in flight the device finds the next one in its queue when it has finished one.

Iterations in which every sequence decodes one token are recorded once for each of a few batch sizes (CUDA graphs) and
replayed with as many rows of nobody as are missing; those with prompt chunks are queued kernel by kernel.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Admission, BlockId, SequenceId
from headrace_worker.adapters.grouped import GroupedAdapters, RowGroup
from headrace_worker.adapters.store import AdapterStore
from headrace_worker.adapters.weights import AdapterWeights
from headrace_worker.cuda.composing import Composed, compose, pad
from headrace_worker.cuda.device import Device, Mark
from headrace_worker.cuda.forward import DeviceBatch, DeviceForward
from headrace_worker.cuda.frame import FrameLayout
from headrace_worker.cuda.places import Places
from headrace_worker.cuda.row_wants import PutRows, Wants, put_rows
from headrace_worker.cuda.sampler import DeviceSampler, Preparation, Sampled, results, to_host
from headrace_worker.cuda.scoring import Scored, plan_scoring
from headrace_worker.cuda.sequence import DeviceSequence, unsampled
from headrace_worker.cuda.tail import Tail
from headrace_worker.cuda.upload import Upload
from headrace_worker.iteration import EngineFacts, SampledToken, SequenceSlice
from headrace_worker.kv_cache import KVCache
from headrace_worker.pooling import Pooling
from headrace_worker.scoring import merged, targets_of

CopyBlocks = Callable[[Tensor, Tensor, Tensor], None]
"""(pages, sources, destinations): see `KVCache.pages`; int64 block ids, in any order."""


class _Iteration(NamedTuple):
    drawn: Sampled | Mark
    scored: Scored | None
    slices: Sequence[SequenceSlice]


class CudaEngine:
    def __init__(
        self,
        forward: DeviceForward,
        cache: KVCache,
        card: ModelCard,
        *,
        sampler: DeviceSampler,
        copy_blocks: CopyBlocks,
        device: Device,
        context: int,
        max_sequences: int,
        tokens_per_iteration: int,
        dtype: torch.dtype,
        samples: bool = True,
        pooling: Pooling | None = None,
    ) -> None:
        """`samples`: `forward` returns logits that are sampled from here; else that is another rank's business.
        `pooling`: where there are embeddings to be made."""
        self.cache = cache
        self.adapters: AdapterStore | None = None
        self._pooling = pooling if samples else None
        self._slots: dict[int, AdapterWeights] = {}
        self._forward = forward
        self._sampler = sampler
        self._copy_blocks = partial(copy_blocks, cache.pages)
        self._samples = samples
        self._device = device
        self._facts = EngineFacts(
            card=card,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            context=context,
            max_sequences=max_sequences,
            tokens_per_iteration=tokens_per_iteration,
            device=str(device.torch_device),
            dtype=str(dtype).removeprefix("torch."),
        )
        self._sequences: dict[SequenceId, DeviceSequence] = {}
        self._places = Places(
            max_sequences, blocks_per_sequence=-(-context // cache.block_size), null_block=cache.null_block
        )
        self._copies: dict[SequenceId, tuple[tuple[BlockId, BlockId], ...]] = {}
        """To be done before the next iteration. Of sequences that are still there: others may have their blocks."""
        self._in_flight: deque[_Iteration] = deque()
        self._replays: dict[int, Callable[[], None]] = {}
        self._batch_sizes: list[int] = []
        with torch.inference_mode():
            at = device.torch_device
            self._tables = torch.from_numpy(self._places.tables).to(at, copy=True)
            self._last_tokens = torch.zeros(self._places.num_places, dtype=torch.int64, device=at)
            self._logits = torch.empty(0, device=at)
            self._mixed = Upload(FrameLayout(max(tokens_per_iteration, max_sequences), max_sequences), device)
            self._decode = Upload(FrameLayout(max_sequences, max_sequences), device)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def looks_ahead(self) -> bool:
        return True

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """What the store has in this slot from now on."""
        if adapter is None:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = adapter

    def add(self, admission: Admission) -> None:
        self._sequences[admission.sequence_id] = self._sampler.add(admission)
        if self.adapters is not None:
            self.adapters.use(admission)
        if self._pooling is not None:
            self._pooling.add(admission)
        if admission.copies:
            self._copies[admission.sequence_id] = admission.copies

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        constraint = self._sequences[sequence_id].constraint
        return constraint is None or constraint.is_ready or (wait and constraint.wait())

    def remove(self, sequence_id: SequenceId) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._copies.pop(sequence_id, None)
            self._places.leave(sequence_id)
            self._sampler.remove(sequence)
            if self.adapters is not None:
                self.adapters.leave(sequence_id)
            if self._pooling is not None:
                self._pooling.remove(sequence_id)

    def rest(self) -> None:
        self.cache.release()

    @torch.inference_mode()
    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        sequences = [self._sequences[piece.sequence_id] for piece in slices]
        taken = [
            self._places.take(sequence, piece.block_ids) for sequence, piece in zip(sequences, slices, strict=True)
        ]
        is_decode = all(piece.num_tokens == 1 and piece.samples for piece in slices)
        upload = self._decode if is_decode else self._mixed
        composed = compose(upload.host, slices, taken, self._places, self.cache.block_size)
        wants = self._wants(slices)
        # Adapters and hidden states are not in what was recorded.
        size = self._size(len(slices)) if is_decode and wants is None else None
        if size is not None:
            pad(upload.host, len(slices), size, self._places, self.cache.block_size)
        tail = Tail()
        preparations = self._preparations(tail)
        sampled = [
            sequence for sequence, piece in zip(sequences, slices, strict=True) if piece.samples and self._samples
        ]
        draw = self._sampler.plan(sampled, composed.num_output, upload.host, tail) if sampled else None
        scoring = plan_scoring(slices, composed.first_rows, tail)
        rows = None if wants is None else put_rows(tail, slices, composed.first_rows, wants)
        extras = upload.send(tail)
        for prepare, numbers in preparations:
            prepare(*(extras[number] for number in numbers))
        if size is not None:
            self._replays[size]()
            logits = self._logits[: len(slices)]
        else:
            batch = self._batch(upload, composed, None if scoring is None else extras[scoring.rows])
            if rows is not None:
                batch = self._with_rows(batch, rows, extras)
            logits = self._forward(batch)
            if self._pooling is not None and batch.hidden is not None:
                self._pooling.take(slices, batch.hidden)
        scored = None
        if scoring is not None and self._samples:
            targets = targets_of(slices, lambda sequence_id: self._sequences[sequence_id].params)
            scored = scoring.score(logits[composed.num_sampled :], extras, targets, self._device)
            logits = logits[: composed.num_sampled]
        embeddings = self._embeddings(sampled)
        drawn = self._device.mark() if draw is None else draw(logits, upload.frame, extras, self._last_tokens)
        if embeddings and isinstance(drawn, Sampled):
            drawn = drawn._replace(embeddings=embeddings)
        self._in_flight.append(_Iteration(drawn, scored, slices))

    def _wants(self, slices: Sequence[SequenceSlice]) -> Wants | None:
        slots = None if self.adapters is None else self.adapters.slots(slices)
        pooled = None if self._pooling is None else self._pooling.wanted(slices)
        return None if slots is None and pooled is None else Wants(slots, pooled)

    def _with_rows(self, batch: DeviceBatch, rows: PutRows, extras: Sequence[Tensor]) -> DeviceBatch:
        adapters = None
        if rows.of_slots:
            adapters = GroupedAdapters([RowGroup(extras[n], self._slots[slot]) for slot, n in rows.of_slots.items()])
        if rows.hidden is None or self._pooling is None:
            return batch._replace(adapters=adapters)
        hidden_rows = extras[rows.hidden]
        shape = (hidden_rows.shape[0], self._pooling.hidden_size)
        hidden = torch.empty(shape, dtype=torch.float32, device=hidden_rows.device)
        return batch._replace(adapters=adapters, hidden_rows=hidden_rows, hidden=hidden)

    def _embeddings(self, sampled: Sequence[DeviceSequence]) -> dict[int, Tensor]:
        """By row, on their way to the host."""
        pooling = self._pooling
        if pooling is None:
            return {}
        wanted = [(row, one.sequence_id) for row, one in enumerate(sampled) if one.sequence_id in pooling]
        return {row: to_host(self._device, pooling.embedding(sequence_id)) for row, sequence_id in wanted}

    def collect(self) -> list[SampledToken]:
        oldest = self._in_flight.popleft()
        sampled: list[SampledToken] = []
        if isinstance(oldest.drawn, Sampled):
            sampled = [self._constrained(item) for item in results(oldest.drawn)]
        else:
            oldest.drawn.wait()
        # The mark comes behind the scores.
        return sampled if oldest.scored is None else merged(oldest.slices, oldest.scored.items(), sampled)

    def _constrained(self, item: SampledToken) -> SampledToken:
        """A sequence with a grammar learns of its token here, before its next one is planned."""
        sequence = self._sequences.get(item.sequence_id)
        if sequence is None or sequence.constraint is None or item.error is not None:
            return item
        if (problem := sequence.constraint.problem) is not None:
            return item._replace(error=problem)
        sequence.constraint.record(item.token)
        return item

    @torch.inference_mode()
    def record(self, batch_sizes: Sequence[int], report: Callable[[int, int], None]) -> None:
        """Records decoding for these batch sizes (ascending); larger batches are queued kernel by kernel. `report` is
        told how many are done."""
        pad(self._decode.host, 0, self._facts.max_sequences, self._places, self.cache.block_size)
        self._decode.send(Tail())
        sizes = [size for size in batch_sizes if size <= self._facts.max_sequences]
        if sizes:
            sample = self._forward(self._batch(self._decode, _decoding(sizes[-1])))
            self._logits = torch.empty_like(sample)
            del sample
        for done, size in enumerate(reversed(sizes)):
            report(done, len(sizes))
            self._replays[size] = self._device.record(partial(self._decode_into_logits, size))
        self._batch_sizes = sizes
        report(len(sizes), len(sizes))

    @torch.inference_mode()
    def logits(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Computes an iteration of sequences that need not have been added up to the logits [slices that sample,
        vocab_size], in slice order. Every token must be known."""
        taken = [self._places.take(unsampled(piece.sequence_id), piece.block_ids) for piece in slices]
        composed = compose(self._mixed.host, slices, taken, self._places, self.cache.block_size)
        tail = Tail()
        preparations = self._preparations(tail)
        extras = self._mixed.send(tail)
        for prepare, numbers in preparations:
            prepare(*(extras[number] for number in numbers))
        for piece in slices:
            self._places.leave(piece.sequence_id)
        return self._forward(self._batch(self._mixed, composed))

    def _preparations(self, tail: Tail) -> list[Preparation]:
        found: list[Preparation] = []
        if (entries := self._places.take_entries()) is not None:
            found.append((self._set_entries, (tail.put(entries.indices), tail.put(entries.block_ids))))
        if self._copies:
            copies = [copy for wanted in self._copies.values() for copy in wanted]
            sources, destinations = np.array(copies, dtype=np.int64).T.copy()
            found.append((self._copy_blocks, (tail.put(sources), tail.put(destinations))))
            self._copies.clear()
        return found + self._sampler.preparations(tail)

    def _set_entries(self, indices: Tensor, block_ids: Tensor) -> None:
        self._tables.view(-1).index_copy_(0, indices, block_ids)

    def _size(self, count: int) -> int | None:
        """The batch size recorded for `count` sequences, if there is one."""
        index = bisect_left(self._batch_sizes, count)
        return self._batch_sizes[index] if index < len(self._batch_sizes) else None

    def _decode_into_logits(self, size: int) -> None:
        self._logits[:size].copy_(self._forward(self._batch(self._decode, _decoding(size))))

    def _batch(self, upload: Upload, composed: Composed, scored_rows: Tensor | None = None) -> DeviceBatch:
        """`scored_rows`: logits are wanted of these rows too, behind the others."""
        frame, num_sequences = upload.frame, composed.num_sequences
        token_ids = frame.token_ids[: composed.num_tokens]
        if composed.num_decodes:
            sources = frame.sources[: composed.num_decodes]
            singles = token_ids[: composed.num_decodes]
            singles.copy_(torch.where(sources == self._places.null_place, singles, self._last_tokens[sources]))
        sampled_rows = None if composed.is_decode else frame.sampled_rows[: composed.num_sampled]
        if sampled_rows is not None and scored_rows is not None:
            sampled_rows = torch.cat([sampled_rows, scored_rows])
        return DeviceBatch(
            token_ids=token_ids,
            positions=frame.positions[: composed.num_tokens],
            kv_slots=frame.kv_slots[: composed.num_tokens],
            sampled_rows=sampled_rows,
            query_starts=frame.query_starts[: num_sequences + 1],
            context_lengths=frame.context_lengths[:num_sequences],
            block_tables=self._tables.index_select(0, frame.places[:num_sequences]),
            num_decodes=composed.num_decodes,
            longest_chunk=composed.longest_chunk,
        )


def _decoding(size: int) -> Composed:
    return Composed(size, size, size, 0, size, np.zeros(size, dtype=np.int64), np.arange(size))
