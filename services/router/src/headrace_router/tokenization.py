"""Text to token ids. Blocking: `PromptPool` runs it off the event loop.

Two tokenizers are made of one file. The plain one reads special tokens wherever they stand; raw completion prompts may
use them, as documented. The other one, for chats, is in `chat_encoder.py`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer

from headrace_router.chat_encoder import ChatEncoder, Learn, load_chat
from headrace_router.detokenization import Vocabulary, build_vocabulary
from headrace_router.tokenizer_files import ids_of, load_tokenizer
from headrace_shared.errors import InvalidRequest, Overloaded, ProtocolError
from headrace_shared.fleet_messages import ModelCard

T = TypeVar("T")

_NORMALIZER_SHRINKAGE = 4
"""Normalization (NFC, say) shortens a text at most by this."""


class TextEncoder:
    """The tokenizer of one model, and its chats' encoder. Safe to use from several threads."""

    def __init__(self, card: ModelCard) -> None:
        """Raises ProtocolError if the card's tokenizer cannot be used."""
        self.vocabulary: Vocabulary = build_vocabulary(card.tokenizer)
        self.plain = load_tokenizer(card.tokenizer)
        self._chat: ChatEncoder | None = None
        self._adds_bos = card.adds_bos and card.bos_token != ""
        self._bos_id = self.plain.token_to_id(card.bos_token) if self._adds_bos else None
        if self._adds_bos and self._bos_id is None:
            raise ProtocolError(f"the tokenizer does not know the token {card.bos_token!r}")
        self.max_chars_per_token = _longest_token(self.plain)

    @property
    def chat(self) -> ChatEncoder:
        """Raises InvalidRequest."""
        if self._chat is None:
            raise InvalidRequest("This model has no chat template.", param="model", code="model_has_no_chat_template")
        return self._chat

    def add_chat(self, chat: ChatEncoder) -> None:
        self._chat = chat

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt; special tokens in it count."""
        ids = ids_of(self.plain, text, add_special_tokens=add_special_tokens)
        return self.with_bos(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.vocabulary.bytes_of, ids)).decode(errors="replace")

    def names_of(self, ids: Sequence[int]) -> list[str]:
        """As the vocabulary has them; empty for ids that only the logits have."""
        return [self.plain.id_to_token(token) or "" for token in ids]

    def with_bos(self, ids: list[int]) -> list[int]:
        """With the token that begins a text, where the model wants one and it is not there yet."""
        return ids if self._bos_id is None or ids[:1] == [self._bos_id] else [self._bos_id, *ids]

    def fewest_tokens(self, num_chars: int) -> int:
        """No text of this length has fewer tokens."""
        return num_chars // self.max_chars_per_token


async def load_encoder(card: ModelCard, learn: Learn) -> TextEncoder:
    """`learn`: of the processes that render templates. Raises ProtocolError if the card cannot be used."""
    encoder = await asyncio.to_thread(TextEncoder, card)
    chat = await load_chat(card, encoder.plain, learn)
    if chat is not None:
        encoder.add_chat(chat)
    return encoder


class PromptPool:
    """Threads for blocking work on prompts. What is long is done one after the other: it takes memory, and nobody else
    waits for it."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self._short = _Threads(num_threads, max_waiting, "prompt")
        self._long = _Threads(1, max_waiting, "long-prompt")

    async def run(self, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Raises Overloaded if too many are waiting."""
        return await (self._long if is_long else self._short).run(work)

    def close(self) -> None:
        self._short.close()
        self._long.close()


class _Threads:
    """With a bounded number of waiting ones."""

    def __init__(self, num_threads: int, max_waiting: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads + max_waiting

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_free <= 0:
            raise Overloaded("Too many prompts are waiting to be tokenized.", retry_after_s=1.0)
        self._num_free -= 1
        future = self._threads.submit(work)
        future.add_done_callback(self._on_done(asyncio.get_running_loop()))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        # The place is taken until the thread is done with it, also when the caller has gone.
        def release() -> None:
            self._num_free += 1

        def from_thread(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
                loop.call_soon_threadsafe(release)

        return from_thread


def _longest_token(tokenizer: Tokenizer) -> int:
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return max(1, longest) * (_NORMALIZER_SHRINKAGE if tokenizer.normalizer is not None else 1)
