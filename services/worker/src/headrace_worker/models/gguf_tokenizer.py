"""The tokenizer that a GGUF file describes, as tokenizer.json.

Byte-level BPE and Gemma's vocabulary are built here from the metadata, because transformers would multiply the time to
start. What comes out tokenizes as transformers' own conversion does, which is asked for every other kind.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_shared.errors import ConfigError
from headrace_worker.models.foreign_tokenizer import first_line, tokenizer_from_gguf

MAX_TOKEN_CHARS = 1024
MAX_VOCABULARY_CHARS = 1 << 24
"""Of all tokens. All divisions of each in two are looked at."""
_CONTROL, _USER_DEFINED = 3, 4
"""llama.cpp's token types."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "llama-v3": _LLAMA3_SPLIT}
_PLAIN = ("smollm", "gpt-2", "default")
"""GPT-2's own splitting."""


def gguf_tokenizer_json(path: Path, metadata: Mapping[str, Any]) -> bytes:
    """Raises ConfigError if the file describes no usable tokenizer."""
    kind, pre_tokenizer = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    is_plain_gemma = str(metadata.get("general.architecture")).startswith("gemma") and not metadata.get(
        "tokenizer.ggml.add_space_prefix"
    )
    try:
        if kind == "gpt2" and (pre_tokenizer in _PLAIN or pre_tokenizer in _SPLITS):
            return _byte_level(metadata, _SPLITS.get(pre_tokenizer))
        if kind == "llama" and is_plain_gemma and "tokenizer.ggml.merges" not in metadata:
            return _gemma(metadata)
    except Exception as error:  # The tokenizers library raises plain Exception.
        raise ConfigError("model", f"{path} describes no usable tokenizer: {error!r:.300}") from error
    return _by_transformers(path)


def _byte_level(metadata: Mapping[str, Any], split: str | None) -> bytes:
    tokens = _tokens(metadata)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("a merge is not a pair")
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    # Control tokens spelled outside the byte alphabet are mislabelled (transformers skips them for the same reason).
    _add_tokens(tokenizer, tokens, metadata, lambda token: set(token) <= alphabet)
    return str(tokenizer.to_str()).encode()


def _gemma(metadata: Mapping[str, Any]) -> bytes:
    """Sentencepiece's BPE with bytes for what it has no pieces for. The file lists no merges: every division of a piece
    in two pieces is one, and pieces merge in the order of the vocabulary."""
    # Runs of spaces are stored as such, though text reaches the vocabulary with its spaces replaced.
    tokens = ["▁" * len(token) if set(token) == {" "} else token for token in _tokens(metadata)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (token[:end], token[end:])
        for token in tokens
        for end in range(len(token) - 1, 0, -1)
        if token[:end] in vocabulary and token[end:] in vocabulary
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(tokenizer, tokens, metadata, lambda token: set(token) != {"▁"})
    return str(tokenizer.to_str()).encode()


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if not all(isinstance(token, str) and len(token) <= MAX_TOKEN_CHARS for token in tokens):
        raise ValueError(f"a token is no text, or has more than {MAX_TOKEN_CHARS} characters")
    if sum(map(len, tokens)) > MAX_VOCABULARY_CHARS:
        raise ValueError(f"the tokens have more than {MAX_VOCABULARY_CHARS} characters")
    return tokens


def _add_tokens(
    tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any], is_added: Callable[[str], bool]
) -> None:
    """The tokens that are matched whole in the text: control tokens and those of the user."""
    typed = list(zip(tokens, metadata.get("tokenizer.ggml.token_type") or (), strict=False))
    control = [token for token, kind in typed if kind == _CONTROL and is_added(token)]
    defined = [token for token, kind in typed if kind == _USER_DEFINED and is_added(token)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _by_transformers(path: Path) -> bytes:
    try:
        return tokenizer_from_gguf(path)
    except Exception as error:  # Whatever a foreign file provokes in there, the user needs one line.
        raise ConfigError("model", f"{path} describes no usable tokenizer: {first_line(error)}") from error
