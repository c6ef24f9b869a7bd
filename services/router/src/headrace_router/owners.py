"""Whose files and batches are whose. Pure."""

import hashlib


def owner_token(owner: str) -> str:
    """Of `Identity.owner`: a part of a bucket's key."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]
