"""One request of a call and how far its choices are."""

from collections.abc import Sequence

from headrace_router.choices import ChoiceText
from headrace_router.token_log import Cursor
from headrace_shared.messages import Request, TokenLogprobs


class Prompt:
    def __init__(
        self,
        request: Request,
        choices: Sequence[ChoiceText],
        num_tokens: int | None = None,
        *,
        flow: int = 0,
        cache_key: str = "",
    ) -> None:
        """`num_tokens` of the prompt, where the request does not hold it. `flow`: the queues of its tenant.
        `cache_key`: requests with the same one are to meet the same cache, whatever they begin with."""
        self.request = request
        self.choices = choices
        self.flow = flow
        self.num_tokens = len(request.prompt) // 4 if num_tokens is None else num_tokens
        self.cache_key = cache_key
        scores_prompt = request.sampling.num_prompt_logprobs is not None
        first = 1 - self.num_tokens if scores_prompt else 0
        # Choice 0 tells of the prompt for all choices.
        self.cursors = [Cursor(0 if number else first) for number in range(len(choices))]
        self.scores: list[TokenLogprobs] = []
        """Log-probabilities of the prompt's tokens but the first, where they were asked for."""
        self.num_cached: int | None = None
        self.stream_sequence: int | None = None
        self.may_be_queued = False
        self.has_started = False
        self.has_ended = False
        self.has_gap = False

    @property
    def told_cached(self) -> int:
        """Prompt tokens from the cache, as its client is told. Where a tenant shares it with others, that would tell of
        those: nothing is."""
        is_own = not self.request.tenant or self.request.cache_salt.startswith("\0")
        return self.num_cached or 0 if is_own else 0

    @property
    def is_complete(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)
