"""What the page's Flood panel may ask for. Pure."""

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headrace_shared.errors import InvalidRequest

MAX_OPEN = 500
"""Calls of one flood at once; those that would be more are told as left out."""
_TEXT = """
time year people way day thing world life hand part child eye place work week case point company number group
problem fact water room mother area money story month lot right study book job word side kind head house
friend hour game line end law car city name team minute idea body back face others level door health art war
history
"""
_WORDS = _TEXT.split()


class FloodPlan(Struct, frozen=True, forbid_unknown_fields=True):
    rate: Annotated[float, Meta(gt=0, le=200)]
    """Calls a second on average, begun at random (Poisson)."""
    duration_s: Annotated[float, Meta(ge=1, le=120)] = 20.0
    prompt_words: Annotated[int, Meta(ge=1, le=2000)] = 64
    output_tokens: Annotated[int, Meta(ge=1, le=2000)] = 48
    model: Annotated[str, Meta(max_length=256)] = ""
    """Empty: the first that is served."""


def parse_plan(data: bytes) -> FloodPlan:
    """Raises InvalidRequest, naming the field."""
    try:
        return msgspec.json.decode(data, type=FloodPlan)
    except msgspec.ValidationError as error:
        text = str(error)
        field = text.partition("`$.")[2].partition("`")[0] or None
        raise InvalidRequest(f"The flood is not valid: {text}.", param=field) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest("The body is not valid JSON.", code="invalid_json") from error


def arrivals(plan: FloodPlan, rng: random.Random) -> Iterator[float]:
    """Seconds from the start."""
    at = rng.expovariate(plan.rate)
    while at < plan.duration_s:
        yield at
        at += rng.expovariate(plan.rate)


def body_of(plan: FloodPlan, model: str, rng: random.Random) -> bytes:
    """One call. No two prompts begin alike, or the prefix cache would answer for the model."""
    prompt = " ".join(rng.choices(_WORDS, k=plan.prompt_words))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": plan.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return msgspec.json.encode(body)
