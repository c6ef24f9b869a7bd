"""What an answer shows of a prompt: its text in front, its tokens, their log-probabilities. Pure."""

from collections.abc import Sequence

from headrace_router.choices import TokenText
from headrace_router.detokenization import Detokenizer, Vocabulary
from headrace_shared.messages import TokenLogprobs


class ShownPrompt:
    def __init__(self, text: str, ids: Sequence[int], scores: Sequence[TokenLogprobs]) -> None:
        """`text` that the answers begin with. `ids`: empty where nobody wants to see them. `scores` of all tokens but
        the first; they are all there when the first token of the answer is."""
        self.text = text
        self.ids = ids
        self.scores = scores

    def tokens(self, vocabulary: Vocabulary) -> list[TokenText]:
        """In front of the answer's own, in `text`."""
        ids = self.ids
        # The tokenizer may have put a token in front that stands for nothing in the text.
        lead = 1 if ids and ids[0] in vocabulary.special_ids and not self._begins_with(vocabulary, ids[0]) else 0
        detokenizer = Detokenizer(vocabulary, skip_special=False)
        logprobs: list[TokenLogprobs | None] = [None, *self.scores]
        tokens = []
        start = 0
        for place, (token, own) in enumerate(zip(ids, logprobs, strict=True)):
            tokens.append(TokenText(token, min(start, len(self.text)), own))
            start += len(detokenizer.push(token)) if place >= lead else 0
        return tokens

    def _begins_with(self, vocabulary: Vocabulary, token: int) -> bool:
        return self.text.startswith(vocabulary.bytes_of(token).decode(errors="replace"))


NOTHING = ShownPrompt("", (), ())
