import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_shared import subjects
from headrace_shared.messages import Lane, RequestId, RouterId, SchedulerId, WorkerId

SAFE = re.compile(r"[A-Za-z0-9_-]{1,64}")
KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")


@given(st.text(max_size=300))
def test_any_model_name_becomes_one_safe_token(name: str) -> None:
    assert SAFE.fullmatch(subjects.subject_token(name))
    queue = subjects.Queue(name, Lane.INTERACTIVE, 12, 3)
    assert queue.subject.count(".") == 3
    assert subjects.hello_subject(name, WorkerId("worker-1")).count(".") == 2
    assert KEY.fullmatch(subjects.model_card_key(name, 12))
    assert SAFE.fullmatch(queue.consumer.name.removesuffix("-interactive-f12p3"))
    assert subjects.queue_of(name, Lane.INTERACTIVE, queue.consumer.name) == queue
    assert subjects.queue_of(name, Lane.BATCH, queue.consumer.name) is None
    assert subjects.queue_of(name + "x", Lane.INTERACTIVE, queue.consumer.name) is None


@given(st.lists(st.text(max_size=40), unique=True, max_size=20))
def test_different_names_have_different_tokens(names: list[str]) -> None:
    assert len({subjects.subject_token(name) for name in names}) == len(names)


def test_plain_names_stay_readable() -> None:
    assert subjects.subject_token("smollm2-135m") == "smollm2-135m"
    assert subjects.subject_token("Qwen/Qwen3-0.6B").startswith("Qwen_Qwen3-0_6B_")


def test_streams_capture_what_is_published() -> None:
    def matches(pattern: str, subject: str) -> bool:
        return re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), subject) is not None

    request, router = RequestId("ab" * 16), RouterId("router-1")
    requests = subjects.requests_stream(10, 1000)
    every = [queue for lane in Lane for flow in (0, 1, 11) for queue in subjects.queues_of("a/b", lane, flow)]
    assert all(matches(requests.subjects[0], queue.subject) for queue in every)
    assert len({queue.subject for queue in every}) == len({queue.consumer.name for queue in every}) == len(every)
    assert matches(subjects.TOKENS.subjects[0], subjects.tokens_subject(router, request))
    assert matches(subjects.all_tokens_of(router), subjects.tokens_subject(router, request))
    assert not matches(subjects.all_tokens_of(RouterId("router-2")), subjects.tokens_subject(router, request))
    assert matches(subjects.CANCELS.subjects[0], subjects.cancel_subject(request))
    assert matches(subjects.ALL_CANCELS, subjects.cancel_subject(request))
    assert matches(subjects.ALL_ATTACHED, subjects.attached_subject(router))
    assert matches(subjects.ALL_HELLOS, subjects.hello_subject("a/b", WorkerId("worker-1")))
    assert matches(subjects.all_hellos_of("a/b"), subjects.hello_subject("a/b", WorkerId("worker-1")))
    assert matches(subjects.ALL_TELEMETRY, subjects.telemetry_subject("worker", "worker-1"))


def test_direct_subjects_name_their_receiver() -> None:
    assert subjects.grants_subject(WorkerId("worker-1")) == "grants.worker-1"
    assert subjects.progress_subject(SchedulerId("scheduler-1")) == "progress.scheduler-1"
    assert subjects.worker_lease_key(WorkerId("worker-1")) == "worker.worker-1"


def test_every_stream_and_bucket_is_bounded() -> None:
    requests = subjects.requests_stream(10, 1000)
    assert requests.work_queue and requests.max_messages == 10 and requests.max_bytes == 1000
    for stream in (subjects.TOKENS, subjects.CANCELS):
        assert stream.in_memory and stream.max_bytes and stream.max_age_s
    assert subjects.LEASES.max_bytes and subjects.MODELS.max_bytes
    for bucket in (subjects.IDEMPOTENCY, subjects.CALLS):
        assert bucket.max_bytes and bucket.ttl_s and not bucket.in_memory


@pytest.mark.parametrize(
    ("lane", "flow", "partition"),
    [
        (Lane.INTERACTIVE, 0, -1),
        (Lane.INTERACTIVE, 0, subjects.NUM_PARTITIONS),
        (Lane.INTERACTIVE, 1, subjects.NUM_TENANT_PARTITIONS),
        (Lane.BATCH, 0, 1),
    ],
)
def test_partitions_have_a_range(lane: Lane, flow: int, partition: int) -> None:
    with pytest.raises(AssertionError):
        _ = subjects.Queue("m", lane, flow, partition).subject
