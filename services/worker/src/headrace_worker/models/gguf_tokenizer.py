"""The tokenizer that a GGUF file describes, as tokenizer.json.

Byte-level BPE is built here from the metadata, because importing transformers would double the time to start. What
comes out equals transformers' own conversion, which is asked for every other kind.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace_shared.errors import ConfigError

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
    if kind == "gpt2" and (pre_tokenizer in _PLAIN or pre_tokenizer in _SPLITS):
        try:
            return _byte_level(metadata, _SPLITS.get(pre_tokenizer))
        except Exception as error:  # The tokenizers library raises plain Exception.
            raise ConfigError("model", f"{path} describes no usable tokenizer: {error!r}") from error
    return _by_transformers(path)


def _byte_level(metadata: Mapping[str, Any], split: str | None) -> bytes:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
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
    typed = list(zip(tokens, metadata.get("tokenizer.ggml.token_type") or (), strict=False))
    # Control tokens spelled outside the byte alphabet are mislabelled (transformers skips them for the same reason).
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in typed if kind == _CONTROL and set(token) <= alphabet]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token, kind in typed if kind == _USER_DEFINED]
    )
    return str(tokenizer.to_str()).encode()


def _by_transformers(path: Path) -> bytes:
    try:
        from transformers import AutoTokenizer  # Takes a second, and most models do not need it.

        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # Whatever a foreign file provokes in there, the user needs one line.
        raise ConfigError("model", f"{path} describes no usable tokenizer: {error}") from error
