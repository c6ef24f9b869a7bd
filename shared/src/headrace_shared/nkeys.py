"""NKeys, the broker's Ed25519 identities, as text: `S…` is a secret seed, `U…` a user's public key.

The broker knows public keys only. Whoever connects signs a nonce of the broker's, so that a secret never travels. The
text is base32 of prefix, key and CRC-16 (https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/nkey_auth).
"""

import base64
import binascii
import secrets

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SEED = 18 << 3
_USER = 20 << 3
_KEY_BYTES = 32


def new_seed() -> str:
    """A user's secret."""
    prefix = bytes((_SEED | _USER >> 5, (_USER & 31) << 3))
    return _to_text(prefix + secrets.token_bytes(_KEY_BYTES))


def public_key_of(seed: str) -> str:
    """Raises ValueError if it is no user's seed."""
    return _to_text(bytes((_USER,)) + _private_key(seed).public_key().public_bytes_raw())


def sign(seed: str, nonce: bytes) -> bytes:
    """The 64 bytes of the signature. Raises ValueError."""
    return _private_key(seed).sign(nonce)


def _private_key(seed: str) -> Ed25519PrivateKey:
    problem = "this is no seed of an nkey"  # without a word of what it is
    try:
        raw = base64.b32decode(seed.strip().encode("ascii") + b"=" * (-len(seed.strip()) % 8))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(problem) from error
    if len(raw) != 2 + _KEY_BYTES + 2 or binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
        raise ValueError(problem)
    if raw[0] & 0xF8 != _SEED or (raw[0] & 7) << 5 | raw[1] >> 3 != _USER:
        raise ValueError("this nkey is no user's seed")
    return Ed25519PrivateKey.from_private_bytes(raw[2:-2])


def _to_text(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")
