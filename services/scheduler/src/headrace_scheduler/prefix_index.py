"""Chained block hashes: the name of a block's content together with everything before it.

hash(block i) = blake2b(hash(block i - 1) | token ids of block i), so equal hashes mean equal prefixes, and a lookup
needs no comparison of tokens. The root holds all else that keys and values depend on, the model, its adapter by content
and the shape of a block, and the cache salt, which keeps tenants apart. Request ids and other names that a client sends
enter no key.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""256 bits: nobody can construct two prefixes that collide."""

TOKEN_BYTES = 4
"""Of one packed token id."""


def root_hash(model: str, cache_salt: str, block_size: int, adapter_digest: str = "") -> BlockHash:
    """The parent of the first block. Different for any difference in the arguments. `adapter_digest`: of the content of
    the adapter, whose name may come to mean another one."""
    digest = blake2b(digest_size=32)
    for part in (model.encode(), cache_salt.encode(), adapter_digest.encode()):
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(block_size.to_bytes(8, "little"))
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, packed_ids: bytes) -> BlockHash:
    """`packed_ids`: the token ids of exactly one block."""
    return BlockHash(blake2b(parent + packed_ids, digest_size=32).digest())


def extend_chain(parent: BlockHash, packed_ids: bytes, block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `packed_ids`, the first of which follows `parent`."""
    width = block_size * TOKEN_BYTES
    chain: list[BlockHash] = []
    for start in range(0, len(packed_ids) - width + 1, width):
        parent = block_hash(parent, packed_ids[start : start + width])
        chain.append(parent)
    return chain


def last_hash(root: BlockHash, chain: Sequence[BlockHash], num_blocks: int) -> BlockHash:
    """The parent of block `num_blocks`."""
    return chain[num_blocks - 1] if num_blocks else root
