"""Chats to token ids: between the text that a template makes and its ids.

Its tokenizer reads control tokens as ordinary text, and instead knows the marks of the chat template (`templates.py`)
as added tokens with the same flags. It splits the text at marks just as the plain tokenizer splits at control tokens,
so harmless chats get exactly the same ids.

Control tokens are those that the file calls special, those that begin and end texts, and whatever added token the
template itself writes around harmless messages: not every file calls its turn markers special. (Some have tokens for
blanks, which are nobody's.)
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headrace_router.template_pool import MODEL_PLACES, Probes, render_message
from headrace_router.templates import TemplateSpec, new_spec
from headrace_router.tokenizer_files import ids_of, load_tokenizer, with_special
from headrace_shared.fleet_messages import ModelCard

Learn = Callable[[TemplateSpec], Awaitable[Probes]]


class ChatEncoder:
    """Of one model. Safe to use from several threads."""

    def __init__(self, card: ModelCard, plain: Tokenizer, spec: TemplateSpec, probes: Probes) -> None:
        self.spec = spec
        self.places = asyncio.Semaphore(MODEL_PLACES)
        """Of the processes that render."""
        self._knows_developer = "developer" in spec.source
        marks = spec.marks
        added = {token.content: (token_id, token) for token_id, token in plain.get_added_tokens_decoder().items()}
        unflagged = {text for text in spec.controls if not added[text][1].special}
        self._marked = load_tokenizer(with_special(card.tokenizer, unflagged) if unflagged else card.tokenizer)
        self._marked.encode_special_tokens = True
        self._marked.add_tokens([_like(added[text][1], marks[text]) for text in spec.controls])
        self._controls = {self._marked.token_to_id(marks[text]): added[text][0] for text in spec.controls}
        self.is_dynamic = not all(
            probe is None or ids_of(plain, probe[0], add_special_tokens=False) == self.ids(probe[1]) for probe in probes
        )

    def message(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        continues: bool = False,
        max_chars: int,
    ) -> bytes:
        """For the process that renders it. `continues`: the chat ends in the middle of its last message. Raises
        InvalidRequest."""
        known = {**variables, "add_generation_prompt": add_generation_prompt, "tools": list(tools) or None}
        if not self._knows_developer:
            messages = _with_known_roles(messages)
        return render_message(
            self.spec, messages, known, continues=continues, is_dynamic=self.is_dynamic, max_chars=max_chars
        )

    def ids(self, text: str) -> list[int]:
        """`text`: as rendered."""
        ids = ids_of(self._marked, text, add_special_tokens=False)
        controls = self._controls
        return [controls.get(token, token) for token in ids]


async def load_chat(card: ModelCard, plain: Tokenizer, learn: Learn) -> ChatEncoder | None:
    """None: the model has no chat template. Raises ProtocolError if it cannot be used."""
    if card.chat_template is None:
        return None
    ends = (card.bos_token, card.eos_token)
    spec = new_spec(card.chat_template, _controls(plain, (), ends), *ends)
    probes = await learn(spec)
    controls = await asyncio.to_thread(_controls, plain, [probe[0] for probe in probes if probe is not None], ends)
    if len(controls) > len(spec.controls):
        spec = new_spec(card.chat_template, controls, *ends)
        probes = await learn(spec)
    return await asyncio.to_thread(ChatEncoder, card, plain, spec, probes)


def _controls(plain: Tokenizer, texts: Iterable[str], ends: Iterable[str]) -> list[str]:
    added = plain.get_added_tokens_decoder()
    written = {token for text in texts for token in ids_of(plain, text, add_special_tokens=False)}
    return [
        token.content
        for token_id, token in added.items()
        if token.content and (token.special or token.content in ends or (token_id in written and token.content.strip()))
    ]


def _like(token: AddedToken, text: str) -> AddedToken:
    return AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=False,
    )


def _with_known_roles(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """`developer` is OpenAI's newer word for `system`."""
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
