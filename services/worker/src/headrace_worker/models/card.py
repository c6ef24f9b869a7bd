"""Model cards: what routers need to know of a model."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace_shared.errors import ConfigError
from headrace_shared.messages import ModelCard
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_tokenizer import gguf_tokenizer_json

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>")
"""End a chat model's turn even where its configuration names another end-of-sequence token only."""


def card_from_gguf(file: GgufFile, *, name: str, vocab_size: int, context: int) -> ModelCard:
    metadata = file.metadata
    tokenizer = gguf_tokenizer_json(file.path, metadata)
    template = metadata.get("tokenizer.chat_template")
    bos, eos = (_token(metadata, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos"))
    eos_ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    # Older files say nothing, and llama.cpp adds the token to sentencepiece vocabularies then.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
    return ModelCard(
        model=name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context=context,
        eos_token_ids=_eos_ids(eos_ids, template, tokenizer),
        bos_token=bos,
        eos_token=eos,
        adds_bos=bool(adds_bos) and bool(bos),
        chat_template=template,
        created=int(time.time()),
    )


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
    return ModelCard(
        model=name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context=context,
        eos_token_ids=_eos_ids(
            [*_listed(generation.get("eos_token_id")), *_listed(config.get("eos_token_id"))], template, tokenizer
        ),
        bos_token=bos,
        eos_token=_spelled(settings.get("eos_token")),
        adds_bos=_adds_bos(tokenizer, bos) or bool(settings.get("add_bos_token") and bos),
        chat_template=template,
        temperature=generation.get("temperature"),
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k"),
        repetition_penalty=generation.get("repetition_penalty"),
        created=int(time.time()),
    )


def read_json(path: Path) -> dict[str, Any]:
    """{} if there is no such file. Raises ConfigError for one that is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("model", f"{path} is no JSON object")
    return value


def _tokenizer_json(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if file.exists():
        data = file.read_bytes()
        _loaded(data)
        return data
    try:
        from transformers import AutoTokenizer  # Takes a second, and most models do not need it.

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # Whatever a foreign file provokes in there, the user needs one line.
        raise ConfigError("model", f"{folder} holds no usable tokenizer: {error}") from error


def _loaded(tokenizer: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(tokenizer)
    except Exception as error:  # The tokenizers library raises plain Exception.
        raise ConfigError("model", f"the tokenizer is unreadable: {error}") from error


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several named ones: the default serves plain chats.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _spelled(token: Any) -> str:
    """Tokens are given as text, or as an object with their text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _adds_bos(tokenizer: bytes, bos: str) -> bool:
    if not bos:
        return False
    loaded = _loaded(tokenizer)
    ids = loaded.encode("a").ids
    return bool(ids) and ids[0] == loaded.token_to_id(bos)


def _eos_ids(candidates: Iterable[Any], template: str | None, tokenizer: bytes) -> tuple[int, ...]:
    ids = [value for value in candidates if isinstance(value, int)]
    if template is not None:
        loaded = _loaded(tokenizer)
        ends = [loaded.token_to_id(token) for token in _TURN_ENDS if token in template]
        ids += [end for end in ends if end is not None]
    return tuple(dict.fromkeys(ids))
