"""An engine that computes nothing but the time it would take. See `iteration.Engine` for the contract."""

from array import array
from collections.abc import Sequence

from headrace_shared.messages import Admission, SequenceId, TokenLogprobs, TopLogprob
from headrace_worker.iteration import EngineFacts, SampledToken, SequenceSlice
from headrace_worker.timing.roofline import Roofline, work_of
from headrace_worker.timing.tokens import TokenStream

NO_MEANING = array("f", [1.0] + 63 * [0.0]).tobytes()
"""Everybody's embedding."""
NO_GRAMMAR = "A simulated worker gives no text that follows a grammar or avoids tokens."


class TimingEngine:
    """Never waits: `elapsed_s` is the engine's own clock, which each iteration advances by what it takes."""

    def __init__(self, roofline: Roofline, facts: EngineFacts, mean_tokens: int = 0) -> None:
        self.elapsed_s = 0.0
        """Of all iterations so far."""
        self.num_sampled = 0
        """Tokens so far."""
        self._roofline = roofline
        self._facts = facts
        self._mean_tokens = mean_tokens
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._sampled: list[SampledToken] = []

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def adapters(self) -> None:
        return None

    @property
    def looks_ahead(self) -> bool:
        return False

    def add(self, admission: Admission) -> None:
        self._sequences[admission.sequence_id] = _Sequence(admission, self._facts.card.vocab_size, self._mean_tokens)

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        return True

    def remove(self, sequence_id: SequenceId) -> None:
        self._sequences.pop(sequence_id, None)

    def rest(self) -> None:
        """There is no cache whose memory could be given back."""

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        self.elapsed_s += self._roofline.iteration_s(work_of((part.start, part.num_tokens) for part in slices))
        self._sampled = []
        for part in slices:
            sequence = self._sequences[part.sequence_id]
            self._sampled += [sequence.score(target) for target in part.targets]
            if part.samples:
                self._sampled.append(sequence.sample(part.start + part.num_tokens))
                self.num_sampled += 1

    def collect(self) -> list[SampledToken]:
        sampled, self._sampled = self._sampled, []
        return sampled


class _Sequence:
    __slots__ = ("_embeds", "_error", "_logprobs", "_num_prompt", "_prompt_logprobs", "_sequence_id", "_stream")

    def __init__(self, admission: Admission, vocab_size: int, mean_tokens: int) -> None:
        request = admission.request
        self._sequence_id = admission.sequence_id
        self._num_prompt = len(request.prompt) // 4
        self._stream = TokenStream(request, admission.choice, vocab_size, mean_tokens)
        self._logprobs = request.sampling.num_logprobs
        self._embeds = request.embeds
        self._prompt_logprobs = request.sampling.num_prompt_logprobs
        sampling = request.sampling
        self._error = NO_GRAMMAR if sampling.grammar or sampling.allowed_token_ids or sampling.bad_words else None

    def score(self, token: int) -> SampledToken:
        """A token of the prompt, which was no surprise either."""
        top = (TopLogprob(token, 0.0),) if self._prompt_logprobs else ()
        return SampledToken(self._sequence_id, token, TokenLogprobs(0.0, top, 1))

    def sample(self, position: int) -> SampledToken:
        """The token at `position` of the whole sequence. Nothing else could have been sampled: its probability is 1."""
        token = self._stream.token(position - self._num_prompt)
        if self._error is not None:
            return SampledToken(self._sequence_id, token, error=self._error)
        if self._embeds:
            return SampledToken(self._sequence_id, token, embedding=NO_MEANING)
        if self._logprobs is None:
            return SampledToken(self._sequence_id, token)
        top = (TopLogprob(token, 0.0),) if self._logprobs else ()
        return SampledToken(self._sequence_id, token, TokenLogprobs(0.0, top))
