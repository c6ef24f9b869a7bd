"""tokenizer.json as it is used here."""

import json
from collections.abc import Container

from tokenizers import Tokenizer

from headrace_shared.errors import ProtocolError


def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Raises ProtocolError."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ProtocolError(f"tokenizer.json is not usable: {error}") from error
    # A file may ask for truncation or padding; a prompt is neither cut nor filled silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Not `Tokenizer.encode`, which lets no other thread run meanwhile: a long prompt would stop every stream."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def with_special(tokenizer_json: bytes, words: Container[str]) -> bytes:
    """The same with these added tokens marked as special."""
    content = json.loads(tokenizer_json)
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["content"] in words
    return json.dumps(content, ensure_ascii=False).encode()
