"""Text to token ids, for prompts and for chats. Blocking: `PromptPool` runs it off the event loop.

Two tokenizers are made of one file. The plain one reads special tokens wherever they stand; raw completion prompts may
use them, as documented. The other one, for chats, reads special tokens as ordinary text, and instead knows the marks
of the chat template as added tokens with the same flags. It splits the text at marks just as the plain one splits at
special tokens, so harmless chats get exactly the same ids.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from headrace_router.chat_template import ChatTemplate
from headrace_router.detokenization import Vocabulary, build_vocabulary
from headrace_shared.errors import InvalidRequest, Overloaded, ProtocolError
from headrace_shared.messages import ModelCard

T = TypeVar("T")

_NORMALIZER_SHRINKAGE = 4
"""Normalization (NFC, say) shortens a text at most by this."""

_PROBES: tuple[tuple[tuple[dict[str, str], ...], bool], ...] = (
    (({"role": "user", "content": "Hi."},), True),
    (({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}), True),
    (
        (
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "1 + 1?"},
        ),
        True,
    ),
    (({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}), False),
)


class TextEncoder:
    """Tokenizer and chat template of one model. Safe to use from several threads."""

    def __init__(self, card: ModelCard) -> None:
        """Raises ProtocolError if the card's tokenizer or template cannot be used."""
        self.vocabulary: Vocabulary = build_vocabulary(card.tokenizer)
        self._plain = _load(card.tokenizer)
        self._adds_bos = card.adds_bos and card.bos_token != ""
        self._bos_id = self._plain.token_to_id(card.bos_token) if self._adds_bos else None
        if self._adds_bos and self._bos_id is None:
            raise ProtocolError(f"the tokenizer does not know the token {card.bos_token!r}")
        self._max_chars_per_token = _longest_token(self._plain)
        self._template: ChatTemplate | None = None
        if card.chat_template is not None:
            self._add_template(card.chat_template, card)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt; special tokens in it count."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_bos(ids) if add_special_tokens else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        continues: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Ids of a chat; `continues`: one that ends in the middle of its last message. Templates write special tokens
        themselves, so the tokenizer adds none unless `add_special_tokens`. Raises InvalidRequest where the template
        refuses it."""
        if self._template is None:
            raise InvalidRequest("This model has no chat template.", param="model", code="model_has_no_chat_template")
        messages = _with_known_roles(messages, self._template.mentions_developer)
        known = {**variables, "add_generation_prompt": add_generation_prompt, "tools": list(tools) or None}
        text = self._template.render(messages, known, continues=continues)
        ids: list[int] = self._marked.encode(text, add_special_tokens=False).ids
        controls = self._controls
        ids = [controls.get(token, token) for token in ids]
        return self._with_bos(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.vocabulary.bytes_of, ids)).decode(errors="replace")

    def names_of(self, ids: Sequence[int]) -> list[str]:
        """As the vocabulary has them; empty for ids that only the logits have."""
        return [self._plain.id_to_token(token) or "" for token in ids]

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self._bos_id is None or ids[:1] == [self._bos_id] else [self._bos_id, *ids]

    def fewest_tokens(self, num_chars: int) -> int:
        """No text of this length has fewer tokens."""
        return num_chars // self._max_chars_per_token

    def _add_template(self, source: str, card: ModelCard) -> None:
        added = self._plain.get_added_tokens_decoder()
        special = {token.content: (token_id, token) for token_id, token in added.items() if token.special}
        self._template = ChatTemplate(source, list(special), card.bos_token, card.eos_token)
        self._marked = _load(card.tokenizer)
        self._marked.encode_special_tokens = True
        flags = [
            AddedToken(
                self._template.marks[text],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=False,
            )
            for text, (_, token) in special.items()
        ]
        self._marked.add_tokens(flags)
        self._controls = {
            self._marked.token_to_id(self._template.marks[text]): token_id for text, (token_id, _) in special.items()
        }
        self._template.is_dynamic = not self._agrees_with_plain(self._template)

    def _agrees_with_plain(self, template: ChatTemplate) -> bool:
        for messages, add_generation_prompt in _PROBES:
            try:
                text = template.render_plain(messages, {"add_generation_prompt": add_generation_prompt})
            except InvalidRequest:
                continue  # not every template knows a system turn
            plain = self._plain.encode(text, add_special_tokens=False).ids
            if plain != self.encode_chat(messages, add_generation_prompt=add_generation_prompt, variables={}):
                return False
        return True


class PromptPool:
    """Threads for blocking work on prompts, with a bounded number of waiting ones."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="prompt")
        self._num_free = num_threads + max_waiting

    async def run(self, work: Callable[[], T]) -> T:
        """Raises Overloaded if too many are waiting."""
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


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ProtocolError(f"tokenizer.json is not usable: {error}") from error
    # A file may ask for truncation or padding; a prompt is neither cut nor filled silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _longest_token(tokenizer: Tokenizer) -> int:
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return max(1, longest) * (_NORMALIZER_SHRINKAGE if tokenizer.normalizer is not None else 1)


def _with_known_roles(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> Sequence[Mapping[str, Any]]:
    """`developer` is OpenAI's newer word for `system`."""
    if knows_developer:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
