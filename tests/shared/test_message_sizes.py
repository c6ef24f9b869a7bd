"""The bound really bounds every message that describes a request."""

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace_shared import codec
from headrace_shared.message_sizes import MIN_BLOCK_SIZE, largest_message, most_tokens
from headrace_shared.messages import (
    Admission,
    BlockId,
    Grant,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    SequenceSnapshot,
    Snapshot,
    StopParams,
    WorkerId,
)

REQUEST = Request(
    request_id=RequestId("f" * 32),
    router=RouterId("router-" + "f" * 32),
    model="é" * 128,
    prompt=codec.pack_ids([2**32 - 1] * 500),
    sampling=SamplingParams(
        seed=2**63 - 1,
        logit_bias={2**31 + i: -1.5 for i in range(300)},
        num_logprobs=20,
        num_prompt_logprobs=20,
        allowed_token_ids=codec.pack_ids(range(2**31, 2**31 + 3000)),
        bad_words=tuple(tuple(range(2**31, 2**31 + length)) for length in range(1, 40)),
        logprob_token_ids=tuple(range(2**31, 2**31 + 128)),
    ),
    stop=StopParams(max_tokens=700, stop_token_ids=tuple(range(2**31, 2**31 + 128))),
    num_choices=16,
    cache_salt="é" * 128,
    trace={"traceparent": "0" * 55, "tracestate": "x" * 512},
)


def test_no_admission_or_snapshot_exceeds_the_bound() -> None:
    num_tokens = 500 + 700
    admission = Admission(
        sequence_id=SequenceId(2**62),
        request=REQUEST,
        choice=15,
        attempt=2**31,
        block_ids=tuple(BlockId(2**31 + i) for i in range(num_tokens // MIN_BLOCK_SIZE)),
        output=codec.pack_ids([2**32 - 1] * 699),
        copies=((BlockId(2**31), BlockId(2**31 + 1)),),
        ack_subject="$JS.ACK." + "x" * 200,
        stream_sequence=2**62,
    )
    grant = Grant(worker=WorkerId("w" * 64), epoch=2**40, number=2**40, progress_seen=0, admissions=(admission,))
    entry = SequenceSnapshot(
        admission=replace(admission, output=b""), tokens=codec.pack_ids([1] * 700), num_computed=2**30
    )
    snapshot = Snapshot(worker=WorkerId("w" * 64), epoch=2**40, part=0, num_parts=1, sequences=(entry,))
    for message in (grant, snapshot):
        assert len(codec.encode(message)) <= largest_message(REQUEST) <= len(codec.encode(message)) + 8192


@example(num_prompt=1, max_tokens=2, max_payload=10990)
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(10_000, 1 << 22))
def test_the_most_tokens_fit_and_few_more_do_not(num_prompt: int, max_tokens: int, max_payload: int) -> None:
    request = replace(REQUEST, prompt=bytes(4 * num_prompt), stop=StopParams(max_tokens=max_tokens))
    most = most_tokens(request, max_payload)
    assert most <= max_tokens
    if most < 1:
        assert largest_message(replace(request, stop=StopParams(max_tokens=2))) > max_payload
        return
    assert largest_message(replace(request, stop=StopParams(max_tokens=most))) <= max_payload
    if most < max_tokens:
        assert largest_message(replace(request, stop=StopParams(max_tokens=most + 2))) > max_payload
