"""Requests with adapters, or for embeddings, run by the iteration loop on any engine."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from headrace_shared.messages import StopParams
from headrace_worker.iteration import Engine
from headrace_worker.loop import IterationLoop
from tests.worker.engine_driver import make_admission


class Wanted(NamedTuple):
    prompt: Sequence[int]
    num_tokens: int = 1
    digest: str = ""
    embeds: bool = False


class Answer(NamedTuple):
    tokens: list[int]
    embedding: list[float]
    error: str | None


def run(engine: Engine, *wanted: Wanted, first_id: int = 1) -> list[Answer]:
    """All at the same time, each in blocks of its own."""
    loop = IterationLoop(engine)
    answers = [Answer([], [], None) for _ in wanted]
    first_block = 0
    for number, (prompt, num_tokens, digest, embeds) in enumerate(wanted):
        num_blocks = -(-(len(prompt) + num_tokens) // engine.facts.block_size)
        admission = make_admission(
            prompt,
            sequence_id=first_id + number,
            block_ids=range(first_block, first_block + num_blocks),
            stop=StopParams(max_tokens=num_tokens),
        )
        first_block += num_blocks
        request = replace(admission.request, adapter="a" if digest else "", adapter_digest=digest, embeds=embeds)
        loop.admit(replace(admission, request=request))
    while (result := loop.step()) is not None:
        for row in result.sequences:
            place = row.sequence_id - first_id
            answer = answers[place]
            if row.token is not None:
                answer.tokens.append(row.token)
            if row.embedding is not None:
                answer.embedding.extend(array("f", row.embedding))
            if row.error is not None:
                answers[place] = answer._replace(error=row.error)
    assert loop.num_sequences == 0
    return answers
