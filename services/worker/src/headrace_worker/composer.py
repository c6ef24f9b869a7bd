"""What the next iteration consists of. Pure.

One rule composes it: every sequence that holds a block for its next token decodes one token, and prompt chunks in
admission order fill the rest of the token budget. There are no phases; a sequence with one token to compute decodes. A
prompt goes before those of a higher rank, which the scheduler gives it, and one that takes more than one iteration
leaves half of each to shorter ones behind it: so no long prompt keeps a short one waiting, nor the reverse.

An iteration that decodes is held up by the prompts in it. Beside decodes long prompts therefore come in smaller chunks,
and so do all where the processor is slow (`pacing.py`).

With an engine that verifies drafts, what is left of the budget goes to guesses at the tokens after the next one: those
that turn out to be what is sampled come for little more than the price of one. Since sampling is a function of logits
and position, drafts change how many tokens an iteration gives, never which.
"""

from collections.abc import Iterable

from headrace_worker.iteration import MAX_EMBEDDED, MAX_TARGETS, EngineFacts, SequenceSlice
from headrace_worker.pacing import Pacer
from headrace_worker.sequences import LoopSequence

BEHIND_SHARE = 32
"""Prompts behind one of a lower rank get this part of an iteration."""

Part = tuple[LoopSequence, SequenceSlice]


class Composer:
    def __init__(self, facts: EngineFacts, pacer: Pacer, max_drafts: int) -> None:
        self._facts = facts
        self._pacer = pacer
        self._max_drafts = max_drafts

    def compose(self, sequences: Iterable[LoopSequence], places: int) -> list[Part]:
        """`sequences`: those that may take part, in admission order; `places`: for at most so many."""
        block_size = self._facts.block_size
        budget = self._facts.tokens_per_iteration
        decoding: list[Part] = []
        prompts: list[LoopSequence] = []
        for sequence in sequences:
            if sequence.num_left > 1 or sequence.wants_embedding:
                prompts.append(sequence)
            elif (part := sequence.next_slice(block_size, 1)) is not None:
                decoding.append((sequence, part))
        prompts.sort(key=_rank)  # stable: of equal ranks in the order of admission
        parts = _with_place(decoding, prompts, min(places, budget))
        budget -= len(parts)
        places -= len(parts)
        budget = self._add_prompts(parts, prompts, budget, places)
        return self._with_drafts(parts, budget) if self._max_drafts and budget else parts

    def _add_prompts(self, parts: list[Part], prompts: list[LoopSequence], budget: int, places: int) -> int:
        """`prompts`: in the order in which they are computed. Returns what is left of the budget."""
        num_long = sum(self._pacer.is_long(sequence.num_uncached) for sequence in prompts)
        num_decoding = len(parts)
        long_budget = self._pacer.allowance(num_long) if parts else budget
        short_budget = most_short = self._pacer.short_allowance(num_decoding) if parts else budget
        lowest = _rank(prompts[0]) if prompts else 0
        # Whoever goes first gets its token when the iteration ends, so those behind must not make it long.
        behind_budget = self._facts.tokens_per_iteration // BEHIND_SHARE
        scored_budget = MAX_TARGETS
        embedded_places = MAX_EMBEDDED
        for position, sequence in enumerate(prompts):
            if not budget or not places:
                break
            is_long = self._pacer.is_long(sequence.num_uncached)
            most = budget if is_long else min(budget, short_budget)
            if most and sequence.num_left > most:
                most -= _whole_tokens(prompts[position + 1 :], most // 2)
            if is_long:
                most = min(most, long_budget)
            is_behind = _rank(sequence) > lowest
            if is_behind:
                most = min(most, behind_budget)
            if sequence.is_scoring:
                most = min(most, scored_budget)
            if sequence.wants_embedding and not embedded_places:
                continue
            if most and (part := sequence.next_slice(self._facts.block_size, most)) is not None:
                parts.append((sequence, part))
                budget -= part.num_tokens
                if is_long:
                    long_budget -= part.num_tokens
                else:
                    short_budget -= part.num_tokens
                behind_budget -= part.num_tokens if is_behind else 0
                scored_budget -= len(part.targets)
                embedded_places -= sequence.wants_embedding
                places -= 1
        self._pacer.composed(num_decoding, most_short - short_budget)
        return budget

    def _with_drafts(self, parts: list[Part], budget: int) -> list[Part]:
        """Guesses fill what is left of the budget."""
        drafted = []
        for sequence, part in parts:
            if part.samples and budget:
                part = sequence.with_drafts(part, self._facts.block_size, min(budget, self._max_drafts))
                budget -= part.num_drafts
            drafted.append((sequence, part))
        return drafted


def _with_place(decoding: list[Part], prompts: list[LoopSequence], places: int) -> list[Part]:
    """Those who decode in the next iteration. All of them if there are places enough; else the ones of the highest rank
    sit this one out, also for prompts that go before them."""
    if len(decoding) + len(prompts) <= places:
        return decoding
    kept = sorted(decoding, key=lambda item: _rank(item[0]))[:places]  # stable
    num_left = places - len(kept)
    for prompt in prompts:
        if num_left:
            num_left -= 1
        elif kept and _rank(kept[-1][0]) > _rank(prompt):
            kept.pop()
        else:
            break
    return kept


def _rank(sequence: LoopSequence) -> int:
    return sequence.admission.rank


def _whole_tokens(prompts: list[LoopSequence], budget: int) -> int:
    """Of those prompts that fit as a whole."""
    num_tokens = 0
    for sequence in prompts:
        if num_tokens + sequence.num_left <= budget:
            num_tokens += sequence.num_left
    return num_tokens
