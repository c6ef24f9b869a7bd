"""Which partition of the queue a prompt belongs to."""

from hashlib import blake2b

PREFIX_TOKENS = 64
"""Prompts that agree in so many tokens meet the same scheduler, which knows who has them cached."""


def partition_of(beginning: bytes, num_partitions: int) -> int:
    """The partition of a packed prompt, or of what its client wants to be put in its place."""
    digest = blake2b(beginning[: 4 * PREFIX_TOKENS], digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_partitions
