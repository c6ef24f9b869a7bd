"""Subjects that settle messages of work queues. They travel: with a delivery, its admission, and what a worker says of
it. Pure."""

from typing import NamedTuple

from headrace_shared.bus_rules import check_subject

MAX_DIGITS = 20
"""Of a number of 64 bits."""


class AckSubject(NamedTuple):
    """What the broker tells in the subject that settles a message."""

    stream: str
    num_delivered: int
    stream_sequence: int
    consumer_sequence: int
    published_at: float
    num_pending: int


def parse_ack_subject(subject: str) -> AckSubject:
    """Both forms: with 9 tokens, or with domain and account before the stream. Raises ValueError."""
    check_subject(subject)
    tokens = subject.split(".")
    if len(tokens) >= 11:
        tokens = tokens[:2] + tokens[4:]
    numbers = tokens[4:9]
    is_sane = all(number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS for number in numbers)
    if len(numbers) < 5 or tokens[:2] != ["$JS", "ACK"] or not is_sane:
        raise ValueError(f"no ack subject: {subject!r}")
    delivered, stream_sequence, consumer_sequence, nanoseconds, pending = map(int, numbers)
    return AckSubject(tokens[2], delivered, stream_sequence, consumer_sequence, nanoseconds / 1e9, pending)


def is_ack_subject(subject: str) -> bool:
    """Whoever may write one that is none could have others say things in their own name, or fail to."""
    try:
        parse_ack_subject(subject)
    except ValueError:
        return False
    return True
