"""A small byte-level model: its tokenizer and its card."""

from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace_shared.fleet_messages import ModelCard

MODEL = "tiny"
CONTEXT = 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "t"), ("|", "im"), ("i", "m"), ("<", "|"), ("e", "r"))

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    """All bytes, a few merges, and special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [pair for pair in MERGES if pair != ("|", "im")]
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)


END = token_id(byte_level_tokenizer(), "<|im_end|>")


def make_card(**changes: Any) -> ModelCard:
    tokenizer = byte_level_tokenizer()
    card = ModelCard(
        model=MODEL,
        tokenizer=tokenizer.to_str().encode(),
        vocab_size=tokenizer.get_vocab_size(),
        context=CONTEXT,
        eos_token_ids=(END,),
        eos_token="<|im_end|>",
        chat_template=CHATML,
        created=1_700_000_000,
    )
    return msgspec.structs.replace(card, **changes)


def byte_ids(text: str) -> list[int]:
    """One token a byte."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    characters = byte_characters()
    return [alphabet[characters[byte]] for byte in text.encode()]


def byte_characters() -> dict[int, str]:
    """What stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
