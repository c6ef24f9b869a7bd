"""One sequence as the iteration loop sees it: its tokens, its blocks and how far it was computed."""

from collections.abc import Iterable

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission, BlockId, FinishReason, SequenceId
from headrace_worker.drafting import PromptLookup
from headrace_worker.iteration import EngineFacts, SequenceSlice


class LoopSequence:
    """Owned by the loop. `tokens` are all known ones (prompt and output); those being sampled are only counted.

        0 ........ num_computed ........ num_submitted ........ num_expected
        | finished iterations | in flight             | to be submitted     |

    `num_expected` = known tokens + tokens that iterations in flight are sampling.
    """

    __slots__ = (
        "admission",
        "block_ids",
        "error",
        "finish",
        "has_grammar",
        "lookup",
        "max_output",
        "min_tokens",
        "num_admitted",
        "num_computed",
        "num_in_flight",
        "num_output",
        "num_sampling",
        "num_scored",
        "num_submitted",
        "sequence_id",
        "stop_token_ids",
        "stopped",
        "tokens",
    )

    def __init__(self, admission: Admission, context: int) -> None:
        request = admission.request
        prompt = unpack_ids(request.prompt)
        output = unpack_ids(admission.output)
        self.admission = admission
        self.sequence_id: SequenceId = admission.sequence_id
        self.tokens = prompt + output
        self.block_ids: list[BlockId] = list(admission.block_ids)
        self.num_admitted = len(self.tokens)
        self.num_computed = admission.num_cached
        self.num_submitted = admission.num_cached
        self.num_sampling = 0
        self.num_in_flight = 0
        """Iterations in flight that contain this sequence."""
        self.num_output = len(output)
        self.max_output = min(request.stop.max_tokens, context - len(prompt))
        self.min_tokens = request.stop.min_tokens
        self.stop_token_ids = frozenset(request.stop.stop_token_ids)
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.lookup = PromptLookup()
        self.has_grammar = bool(request.sampling.grammar) or any(len(word) > 1 for word in request.sampling.bad_words)
        """Which token may be next depends on the one before: none is sampled while another one is."""
        self.num_scored = len(prompt) if scores_prompt(admission) else 0
        """Leading tokens whose log-probabilities are wanted, but for the first one's, which follows nothing."""
        self.stopped = False
        """Released by the scheduler."""
        if output:
            # An earlier attempt may have got to the end without anybody hearing of it.
            self._find_end()

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None or self.stopped

    @property
    def num_left(self) -> int:
        """Known tokens, or such as are being sampled, that no iteration has got yet."""
        return len(self.tokens) + self.num_sampling - self.num_submitted

    @property
    def is_scoring(self) -> bool:
        """Its next slice has targets."""
        return self.num_submitted + 1 < self.num_scored

    @property
    def wants_embedding(self) -> bool:
        """Of what its next slice belongs to."""
        return self.admission.request.embeds and not self.num_sampling

    @property
    def num_uncached(self) -> int:
        """Tokens that were to be computed when it came."""
        return self.num_admitted - self.admission.num_cached

    def next_slice(self, block_size: int, budget: int) -> SequenceSlice | None:
        """The next positions to compute, at most `budget`; None if there is nothing to compute or no block for it."""
        if self.num_output + self.num_sampling >= self.max_output:
            return None
        start = self.num_submitted
        num_expected = len(self.tokens) + self.num_sampling
        num_tokens = min(num_expected - start, budget, len(self.block_ids) * block_size - start)
        if num_tokens <= 0:
            return None
        end = start + num_tokens
        token_ids = None if self.num_sampling else self.tokens[start:end]
        targets = self.tokens[start + 1 : min(end + 1, self.num_scored)] if self.is_scoring else ()
        return SequenceSlice(
            self.sequence_id, start, num_tokens, token_ids, self.block_ids, end == num_expected, targets=targets
        )

    def with_drafts(self, part: SequenceSlice, block_size: int, most: int) -> SequenceSlice:
        """The slice, which samples, with at most `most` draft tokens behind it."""
        end = part.start + part.num_tokens
        # The last token of all needs no draft behind it.
        most = min(most, len(self.block_ids) * block_size - end, self.max_output - self.num_output - 1)
        if most <= 0 or part.token_ids is None:
            return part
        drafts = self.lookup.draft(self.tokens, most)
        return part._replace(
            num_tokens=part.num_tokens + len(drafts),
            token_ids=[*part.token_ids, *drafts],
            num_drafts=len(drafts),
        )

    def submitted(self, part: SequenceSlice) -> None:
        self.num_submitted = part.start + part.num_tokens - part.num_drafts
        self.num_in_flight += 1
        if part.samples:
            self.num_sampling += 1

    def computed(self, num_computed: int) -> None:
        """A finished iteration left valid keys and values at the positions before `num_computed`; with drafts that were
        right, more than was submitted of the tokens known then."""
        self.num_computed = num_computed
        self.num_submitted = max(self.num_submitted, num_computed)

    def sampled(self, token: int) -> None:
        """A finished iteration sampled `token`: keeps it and finds out whether it ends the sequence."""
        self.tokens.append(token)
        self.num_output += 1
        self._find_end()

    def _find_end(self) -> None:
        if self.tokens[-1] in self.stop_token_ids and self.num_output > self.min_tokens:
            self.finish = FinishReason.STOP
        elif self.num_output >= self.max_output:
            self.finish = FinishReason.LENGTH


def admission_problem(admission: Admission, facts: EngineFacts) -> str | None:
    """Why this admission cannot run here; None if it can. The scheduler knows the same facts, so this is a last guard
    before a wrong number becomes a write outside the cache."""
    num_tokens, remainder = divmod(len(admission.request.prompt) + len(admission.output), 4)
    if remainder or not num_tokens:
        return "The prompt is not readable."
    if not 0 <= admission.num_cached < num_tokens or (admission.request.embeds and admission.num_cached):
        return "The number of cached tokens is wrong."
    if admission.num_cached and scores_prompt(admission):
        return "Log-probabilities of a prompt need all of it to be computed."
    num_prompt = len(admission.request.prompt) // 4
    if num_prompt >= facts.context or num_tokens > facts.context:
        return f"The prompt of {num_prompt} tokens leaves no room for an answer in a context of {facts.context}."
    if not are_blocks(admission.block_ids, facts) or not all(are_blocks(copy, facts) for copy in admission.copies):
        return "The granted cache blocks do not exist."
    ids = unpack_ids(admission.request.prompt + admission.output)
    if max(ids) >= facts.card.vocab_size:
        return "The prompt has token ids outside the model's vocabulary."
    return None


def scores_prompt(admission: Admission) -> bool:
    """An earlier attempt that came to an output has told the log-probabilities of the prompt."""
    wanted = admission.request.sampling.num_prompt_logprobs
    return wanted is not None and admission.choice == 0 and not admission.output


def are_blocks(block_ids: Iterable[BlockId], facts: EngineFacts) -> bool:
    return all(0 <= block_id < facts.num_blocks for block_id in block_ids)
