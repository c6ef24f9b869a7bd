"""Which partition of the queue a prompt belongs to."""

from hashlib import blake2b

PREFIX_TOKENS = 64
"""Prompts that agree in so many tokens meet the same scheduler, which knows who has them cached."""


def partition_of(prompt: bytes, num_partitions: int) -> int:
    """The partition of a packed prompt."""
    digest = blake2b(prompt[: 4 * PREFIX_TOKENS], digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_partitions
