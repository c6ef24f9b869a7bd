"""Numbering, adoption and heartbeats towards one worker."""

from typing import Any

import msgspec
import pytest

from headrace_scheduler.decisions import Credit
from headrace_scheduler.worker_link import (
    ADOPTION_TIMEOUT_S,
    GRANT_LAG_S,
    HEARTBEAT_S,
    WorkerLink,
    admission_bytes,
    split_credit,
)
from headrace_shared import codec
from headrace_shared.errors import BusUnavailable
from headrace_shared.messages import (
    Admission,
    Adopt,
    BlockId,
    ControlMessage,
    Extension,
    Grant,
    Progress,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SchedulerId,
    SequenceId,
    Snapshot,
    StopParams,
    WorkerId,
)

WORKER = WorkerId("worker-1")


class Wire:
    def __init__(self) -> None:
        self.sent: list[Adopt | Grant] = []
        self.is_down = False

    def publish(self, subject: str, data: bytes) -> None:
        assert subject == "grants.worker-1"
        if self.is_down:
            raise BusUnavailable("down")
        self.sent.append(codec.decode(data, ControlMessage))

    @property
    def grants(self) -> list[Grant]:
        return [message for message in self.sent if isinstance(message, Grant)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def new_link(wire: Wire, max_payload: int = 1 << 20) -> WorkerLink:
    return WorkerLink(WORKER, SchedulerId("scheduler-1"), 3, wire.publish, max_payload, 0.0)


def active_link(wire: Wire, max_payload: int = 1 << 20) -> WorkerLink:
    link = new_link(wire, max_payload)
    assert link.on_snapshot(snapshot(0, 1), 0.0) == []
    return link


def snapshot(part: int, num_parts: int, epoch: int = 3) -> Snapshot:
    return Snapshot(worker=WORKER, epoch=epoch, part=part, num_parts=num_parts)


def progress(
    number: int, grant_seen: int = 0, *, epoch: int = 3, resync: bool = False, iterations: int = 0
) -> Progress:
    return Progress(
        worker=WORKER, epoch=epoch, number=number, grant_seen=grant_seen, resync=resync, num_iterations=iterations
    )


def admission(number: int, num_prompt: int = 10) -> Admission:
    request = Request(
        request_id=RequestId(f"{number:032x}"),
        router=RouterId("r"),
        model="m",
        prompt=codec.pack_ids(range(num_prompt)),
        sampling=SamplingParams(seed=0),
        stop=StopParams(max_tokens=5),
    )
    return Admission(
        sequence_id=SequenceId(number), request=request, choice=0, attempt=0, block_ids=(BlockId(1), BlockId(2))
    )


def test_introduces_itself_and_waits_for_all_parts(wire: Wire) -> None:
    link = new_link(wire)
    assert wire.sent == [Adopt(worker=WORKER, scheduler=SchedulerId("scheduler-1"), epoch=3)]
    assert link.on_snapshot(snapshot(1, 2), 0.1) is None
    link.tick(1.0)
    link.grant(Credit(admissions=[admission(1)]), 1.0)
    assert not link.is_active and wire.grants == []
    assert link.on_snapshot(snapshot(0, 2), 0.2) == []
    assert link.is_active
    assert link.on_snapshot(snapshot(0, 2), 0.3) is None, "a snapshot counts once"


def test_a_snapshot_of_another_epoch_is_ignored(wire: Wire) -> None:
    link = new_link(wire)
    assert link.on_snapshot(snapshot(0, 1, epoch=2), 0.1) is None
    assert not link.is_active


def test_broken_without_a_complete_snapshot_in_time(wire: Wire) -> None:
    link = new_link(wire)
    link.on_snapshot(snapshot(0, 2), 0.1)
    link.tick(ADOPTION_TIMEOUT_S)
    assert link.broken is None
    link.tick(ADOPTION_TIMEOUT_S + 0.1)
    assert link.broken is not None


def test_grants_are_numbered_and_tell_what_was_seen(wire: Wire) -> None:
    link = active_link(wire)
    link.grant(Credit(admissions=[admission(1)]), 0.1)
    assert link.on_progress(progress(1, 1), 0.2)
    link.grant(Credit(releases=[SequenceId(1)]), 0.3)
    assert [(grant.number, grant.progress_seen) for grant in wire.grants] == [(1, 0), (2, 1)]


def test_progress_is_applied_once_and_in_order(wire: Wire) -> None:
    link = active_link(wire)
    assert link.on_progress(progress(1), 0.1)
    assert not link.on_progress(progress(1), 0.1)
    assert link.on_progress(progress(2), 0.1)
    assert not link.on_progress(progress(3, epoch=2), 0.1)
    assert link.broken is None


@pytest.mark.parametrize("bad", [progress(2), progress(1, resync=True)], ids=["gap", "resync"])
def test_a_gap_or_a_resync_breaks_the_link(wire: Wire, bad: Progress) -> None:
    link = active_link(wire)
    assert not link.on_progress(bad, 0.1)
    assert link.broken is not None
    link.grant(Credit(admissions=[admission(1)]), 0.2)
    assert wire.grants == [] and not link.on_progress(progress(1), 0.3)


def test_progress_before_the_snapshot_means_that_a_part_is_lost(wire: Wire) -> None:
    link = new_link(wire)
    assert not link.on_progress(progress(1), 0.1)
    assert link.broken is not None


def test_heartbeats_fill_the_silence(wire: Wire) -> None:
    link = active_link(wire)
    link.tick(HEARTBEAT_S / 2)
    assert wire.grants == []
    link.tick(HEARTBEAT_S)
    link.tick(HEARTBEAT_S + 0.1)
    assert [grant.number for grant in wire.grants] == [1]


def test_a_grant_that_is_not_applied_breaks_the_link(wire: Wire) -> None:
    link = active_link(wire)
    now = 0.0
    number = 0
    while now < 2 * GRANT_LAG_S:
        now += 0.1
        number += 1
        link.tick(now)
        link.on_progress(progress(number, grant_seen=len(wire.grants) - 1), now)
    assert link.broken is None, "it keeps up, if late"
    while now < 4 * GRANT_LAG_S and link.broken is None:
        now += 0.1
        number += 1
        link.tick(now)
        link.on_progress(progress(number, grant_seen=3), now)
    assert link.broken is not None


def test_a_failed_publish_breaks_the_link(wire: Wire) -> None:
    link = active_link(wire)
    wire.is_down = True
    link.grant(Credit(admissions=[admission(1)]), 0.1)
    assert link.broken is not None


def test_notes_when_the_engine_last_moved(wire: Wire) -> None:
    link = active_link(wire)
    link.on_progress(progress(1, iterations=5), 1.0)
    link.on_progress(progress(2, iterations=5), 2.0)
    assert link.iterated_at == 1.0


def test_credit_is_split_below_the_payload_limit(wire: Wire) -> None:
    link = active_link(wire, max_payload=16_000)
    credit = Credit(
        admissions=[admission(number, 500) for number in range(1, 21)],
        extensions=[Extension(SequenceId(number), (BlockId(number),)) for number in range(1, 1001)],
        releases=[SequenceId(number) for number in range(1, 5001)],
    )
    link.grant(credit, 0.1)
    assert [grant.number for grant in wire.grants] == list(range(1, len(wire.grants) + 1))
    assert all(len(codec.encode(grant)) <= 16_000 for grant in wire.grants)
    assert [a.sequence_id for grant in wire.grants for a in grant.admissions] == list(range(1, 21))
    assert [e.sequence_id for grant in wire.grants for e in grant.extensions] == list(range(1, 1001))
    assert [key for grant in wire.grants for key in grant.releases] == list(range(1, 5001))
    kinds = [(bool(g.admissions), bool(g.extensions), bool(g.releases)) for g in wire.grants]
    assert kinds == sorted(kinds, reverse=True) or any(sum(kind) > 1 for kind in kinds)


def test_small_credit_is_one_grant() -> None:
    credit = Credit(admissions=[admission(1)], extensions=[Extension(SequenceId(2), (BlockId(3),))], releases=[])
    assert len(list(split_credit(credit, 1 << 20))) == 1


LARGE = 2**32 - 1
"""No token or block id takes more bytes."""


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": codec.pack_ids(range(16_384))},
        {"bad_words": ((LARGE,) * 32,) * 128},
        {"bad_words": ((LARGE,),) * 4096},
        {"logprob_token_ids": (LARGE,) * 512},
        {"grammar": "\u6c34" * 20_000},
        {"logit_bias": {LARGE - number: -0.1 for number in range(1024)}},
        {},
    ],
    ids=lambda sampling: next(iter(sampling), "none"),
)
def test_no_admission_is_larger_than_reckoned(wire: Wire, sampling: dict[str, Any]) -> None:
    """Else a grant of several exceeds the broker's limit, and the worker is adopted again and again."""
    request = msgspec.structs.replace(
        admission(1).request,
        request_id=RequestId("r" * 64),
        router=RouterId("\u6c34" * 32),
        model="\u6c34" * 256,
        tenant="\u6c34" * 256,
        cache_salt="\u6c34" * 256,
        adapter="\u6c34" * 128,
        adapter_digest="d" * 64,
        trace={"traceparent": "t" * 55, "": "", "tracestate": "s" * 512},
        num_choices=128,
        priority=-100,
        weight=0.1,
        timeout_s=0.1,
        embeds=True,
        sampling=SamplingParams(
            seed=2**63 - 1,
            temperature=0.1,
            top_k=LARGE,
            top_p=0.1,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            num_logprobs=20,
            num_prompt_logprobs=20,
            **sampling,
        ),
        stop=StopParams(max_tokens=2**20, min_tokens=2**20, stop_token_ids=(LARGE,) * 256),
    )
    large = Admission(
        sequence_id=SequenceId(2**62),
        request=request,
        choice=127,
        attempt=2**20,
        block_ids=(BlockId(LARGE),) * 1000,
        output=bytes(4000),
        num_cached=2**20,
        copies=((BlockId(LARGE), BlockId(LARGE)),) * 8,
        ack_subject="$" * 200,
        stream_sequence=2**62,
        num_losses=2**20,
        suspicion=2**20,
        rank=-(2**20),
    )
    size = len(codec.encode(large))
    assert size <= admission_bytes(large) <= 4 * size + 4096
    link = active_link(wire, 1 << 18)
    link.grant(Credit(admissions=[large] * 20, extensions=[], releases=[]), 0.0)
    assert all(len(codec.encode(grant)) <= 1 << 18 for grant in wire.grants)
    assert sum(len(grant.admissions) for grant in wire.grants) == 20
