"""Which smaller model answers while a model's queue is long, for those who allow it. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from headrace_shared.errors import ConfigError


def parse_overflow(pairs: Sequence[str]) -> dict[str, str]:
    """`large=small` each. Raises ConfigError."""
    smaller: dict[str, str] = {}
    for pair in pairs:
        large, equals, small = (part.strip() for part in pair.partition("="))
        if not (large and equals and small):
            raise ConfigError("overflow", f"{pair!r} is not of the form MODEL=SMALLER")
        if large in smaller:
            raise ConfigError("overflow", f"{large} is there twice")
        smaller[large] = small
    for model in smaller:
        seen = {model}
        while (model := smaller.get(model, "")) != "":
            if model in seen:
                raise ConfigError("overflow", f"{model} overflows into itself")
            seen.add(model)
    return smaller


class Overflow:
    def __init__(self, smaller: Mapping[str, str], above_s: float, below_s: float) -> None:
        """Begins when the first token is expected later than `above_s`, and lasts until it is expected before
        `below_s`: no switching to and fro at one threshold. Raises ConfigError."""
        if smaller and below_s > above_s:
            raise ConfigError("overflow_below_s", f"{below_s:g} exceeds overflow_above_s, which is {above_s:g}")
        self._smaller = smaller
        self._above_s = above_s
        self._below_s = below_s
        self._is_open: dict[str, bool] = {}

    def update(self, model: str, first_token_s: float | None) -> bool:
        """Whether requests for the model overflow now. None: not known, so that nothing changes."""
        if model not in self._smaller:
            return False
        is_open = self._is_open.get(model, False)
        if first_token_s is not None:
            is_open = first_token_s > (self._below_s if is_open else self._above_s)
            self._is_open[model] = is_open
        return is_open

    def smaller(self, model: str) -> Iterator[str]:
        """From the next smaller one to the smallest."""
        while (model := self._smaller.get(model, "")) != "":
            yield model
