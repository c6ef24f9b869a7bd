"""A short, seeded run over everything that reads what others wrote; `python -m benchmarks.fuzz` is the long one."""

from pathlib import Path
from random import Random

import pytest

from tests.fuzz import answers, bodies, checkpoints, wire
from tests.fuzz.fuzzing import Findings, Target, fuzz, run
from tests.fuzz.http import fuzz_http

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised while transformers is imported
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, for weights that overflow
]

SEED = 20_261_129


def check(target: Target, num_runs: int) -> None:
    findings = Findings()
    for data in target.seeds:
        run(target, data, findings)
    assert findings.num_accepted[target.name] or target.name in REFUSED, "what it begins with is valid"
    fuzz(target, Random(f"{SEED} {target.name}"), num_runs, findings)
    assert not findings.failures, findings.failures[0]


REFUSED = ("checkpoint: a GGUF file", "checkpoint: a safetensors file", "checkpoint: a safetensors header")
"""The seeds hold few tensors, and so are refused at the very end, for one that is missing."""
NAMES = [target.name for target in [*wire.targets(), *bodies.targets(), *answers.targets()]]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_error_that_is_meant_for_it_comes_out(name: str) -> None:
    target = next(each for each in [*wire.targets(), *bodies.targets(), *answers.targets()] if each.name == name)
    check(target, 100)


def test_checkpoints_raise_nothing_but_config_errors(tmp_path: Path) -> None:
    for target in checkpoints.targets(tmp_path):
        check(target, 100)


async def test_no_body_makes_a_router_fail() -> None:
    findings = Findings()
    await fuzz_http(Random(SEED), 400, findings)
    assert not findings.failures, findings.failures[0]
    accepted = {name for name, number in findings.num_accepted.items() if number}
    assert {"http: POST /v1/completions", "http: POST /v1/chat/completions", "http: bytes"} <= accepted
    assert {"http: POST /tokenize", "http: GET /v1/files", "http: DELETE /v1/files/{file_id}"} <= set(findings.num_runs)
