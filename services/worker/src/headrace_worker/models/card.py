"""Model cards: what routers need to know of a model."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_worker.models.config import MOST
from headrace_worker.models.foreign_tokenizer import first_line, tokenizer_from_folder
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_tokenizer import gguf_tokenizer_json
from headrace_worker.models.small_files import (
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    read_bytes,
    read_json,
    read_text,
)

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>")
"""End a chat model's turn even where its configuration names another end-of-sequence token only."""

SAMPLING_DEFAULTS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 31),
    "repetition_penalty": (1e-6, 10.0),
}
"""What a generation config may say about sampling for whoever asks for nothing else, and the range of each."""
_GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Where llama.cpp's converter writes these."""


def card_from_gguf(file: GgufFile, *, name: str, vocab_size: int, context: int) -> ModelCard:
    metadata = file.metadata
    tokenizer = gguf_tokenizer_json(file.path, metadata)
    template = _template(metadata.get("tokenizer.chat_template"))
    bos, eos = (_token(metadata, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos"))
    eos_ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    # Older files say nothing, and llama.cpp adds the token to sentencepiece vocabularies then.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
    card = ModelCard(
        model=name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context=context,
        eos_token_ids=_eos_ids(eos_ids, template, tokenizer, vocab_size),
        bos_token=bos,
        eos_token=eos,
        adds_bos=bool(adds_bos) and bool(bos),
        chat_template=template,
        created=int(time.time()),
    )
    return replace(card, **_sampling(metadata, _GGUF_SAMPLING, file.path.name))


def _token(metadata: Mapping[str, Any], key: str) -> str:
    index = metadata.get(key)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else ""


def card_from_folder(folder: Path, *, name: str, vocab_size: int, context: int) -> ModelCard:
    """From tokenizer.json, tokenizer_config.json, generation_config.json and config.json, as far as they are there."""
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json")
    settings = read_json(folder / "tokenizer_config.json")
    tokenizer = _tokenizer_json(folder)
    template = _chat_template(folder, settings)
    bos = _spelled(settings.get("bos_token"))
    card = ModelCard(
        model=name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context=context,
        eos_token_ids=_eos_ids(
            [*_listed(generation.get("eos_token_id")), *_listed(config.get("eos_token_id"))],
            template,
            tokenizer,
            vocab_size,
        ),
        bos_token=bos,
        eos_token=_spelled(settings.get("eos_token")),
        adds_bos=_adds_bos(tokenizer, bos, is_told_to=settings.get("add_bos_token") is True),
        chat_template=template,
        created=int(time.time()),
    )
    return replace(card, **_sampling(generation, {name: name for name in SAMPLING_DEFAULTS}, "generation_config.json"))


def _sampling(given: Mapping[str, Any], keys: Mapping[str, str], where: str) -> dict[str, float]:
    """The defaults that are given, by their names in a card. `keys`: what each is called there."""
    found: dict[str, float] = {}
    for name, key in keys.items():
        value = given.get(key)
        low, high = SAMPLING_DEFAULTS[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError("model", f"{key} in {where} is no number from {low} to {high}")
        # GGUF files have them as float32: 0.9 is 0.8999999762 there.
        found[name] = int(value) if name == "top_k" else float(f"{value:.6g}")
    return found


def _tokenizer_json(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if file.exists():
        data = read_bytes(file, MAX_TOKENIZER_BYTES)
        if max(_loaded(data).get_vocab().values(), default=0) >= MOST["vocab_size"]:
            raise ConfigError("model", f"{file}: a token has an id of {MOST['vocab_size']} or more")
        return data
    try:
        return tokenizer_from_folder(folder)
    except ConfigError:
        raise
    except Exception as error:  # Whatever a foreign file provokes in there, the user needs one line.
        raise ConfigError("model", f"{folder} holds no usable tokenizer: {first_line(error)}") from error


def _loaded(tokenizer: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(tokenizer)
    except Exception as error:  # The tokenizers library raises plain Exception.
        raise ConfigError("model", f"the tokenizer is unreadable: {error}") from error


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return read_text(separate, MAX_TEMPLATE_BYTES)
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several named ones: the default serves plain chats.
        defaults = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(defaults, {}).get("template")
    return _template(template)


def _template(given: Any) -> str | None:
    if isinstance(given, str) and len(given) > MAX_TEMPLATE_BYTES:
        raise ConfigError("model", f"the chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return given if isinstance(given, str) else None


def _spelled(token: Any) -> str:
    """Tokens are given as text, or as an object with their text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _adds_bos(tokenizer: bytes, bos: str, *, is_told_to: bool) -> bool:
    if not bos:
        return False
    loaded = _loaded(tokenizer)
    bos_id = loaded.token_to_id(bos)
    if is_told_to and bos_id is None:
        raise ConfigError("model", f"the tokenizer does not know the token {bos[:64]!r} that all prompts begin with")
    return is_told_to or loaded.encode("a").ids[:1] == [bos_id]


def _eos_ids(candidates: Iterable[Any], template: str | None, tokenizer: bytes, vocab_size: int) -> tuple[int, ...]:
    ids = [value for value in candidates if isinstance(value, int) and not isinstance(value, bool)]
    if template is not None:
        loaded = _loaded(tokenizer)
        ends = [loaded.token_to_id(token) for token in _TURN_ENDS if token in template]
        ids += [end for end in ends if end is not None]
    # Some files say -1 for none; what the model cannot say ends nothing.
    return tuple(dict.fromkeys(value for value in ids if 0 <= value < vocab_size))
