"""Quantized weights on the real model: the bounds that benchmarks/perplexity.py shows, on a piece of its text."""

import math

import pytest

from benchmarks.perplexity import Scorer, token_ids
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.source import find_model
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.native.library import load

pytestmark = pytest.mark.model

MOST_WORSE = {"int8": 0.01, "int4": 0.04}


def test_perplexity_stays_within_its_bounds() -> None:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    checkpoint = open_checkpoint(find_model("smollm2-135m").path)
    ids = token_ids(checkpoint, 1024)
    reference = Scorer(checkpoint, "none").loss(ids)
    for quantization, bound in MOST_WORSE.items():
        assert math.expm1(Scorer(checkpoint, quantization).loss(ids) - reference) < bound
