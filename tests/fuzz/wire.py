"""What comes from the broker: messages, and records that stay there."""

import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from headrace_router.batches.record import BatchRecord
from headrace_router.batches.results import ResultPart
from headrace_router.call_record import AnswerForm, CallRecord
from headrace_router.call_store import KeyEntry
from headrace_router.files.record import FileRecord, FileState
from headrace_router.rate_limits import AccountRecord
from headrace_router.responses_api.stored import StoredResponse, Unfinished, pack, unpack
from headrace_router.tools import CallFormat, ToolUse
from headrace_scheduler.recording import STATE, Chunk
from headrace_scheduler.replay import chunks, split
from headrace_shared import model_cards
from headrace_shared.api_keys import ApiKey
from headrace_shared.codec import decode, encode, unpack_ids
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.leases import LeaseRecord
from headrace_shared.messages import ControlMessage, LogMessage, ReportMessage, SchedulerId, TokenFrame
from headrace_shared.record_messages import FlightPart
from headrace_worker.config import EngineConfig
from headrace_worker.parallel.rendezvous import LeaderRecord, MemberRecord, NodeRecord, NodeState
from tests.fuzz.fuzzing import MAX_INPUT_BYTES, Target
from tests.fuzz.mutation import mutate_bytes, mutate_json, mutate_msgpack
from tests.shared.samples import REQUEST, SAMPLES

CALL = CallRecord(
    owner="tenant:0",
    created=1,
    form=AnswerForm(
        is_chat=True,
        stream=True,
        include_usage=True,
        continuous_usage=False,
        skip_special_tokens=True,
        stop_strings=("\n",),
        include_stop=False,
        tools=ToolUse(format=CallFormat.TAGGED, names=("f",), is_parallel=True),
    ),
    requests=(REQUEST,),
    num_prompt_tokens=(2,),
    stream_sequences=(7,),
)
KEY = KeyEntry(
    fingerprint=bytes(32),
    request_id=REQUEST.request_id,
    router=REQUEST.router,
    seed=1,
    created=2,
    claimed_at=3.0,
)
LEADER = LeaderRecord(
    holder="node-1",
    epoch=3,
    state=NodeState.RUNNING,
    num_nodes=2,
    tensor_parallel=2,
    pipeline_parallel=1,
    host="10.0.0.1",
    store_port=1,
    command_port=2,
    token="t",
    config=EngineConfig(),
)
MEMBER = MemberRecord(holder="node-2", epoch=3, state=NodeState.JOINED, host="10.0.0.2")
RESPONSE = StoredResponse(
    owner="tenant:0",
    response=pack({"id": "resp_1", "status": "completed", "output": [{"type": "message"}]}),
    items=pack([{"type": "message", "role": "user", "content": "a"}]),
    call=CALL,
    answer=(TokenFrame(request_id=REQUEST.request_id, choice=0, attempt=0, index=0, tokens=(1, 2)),),
)
FILE = FileRecord(
    file_id="file-1",
    owner="tenant:0",
    filename="a.jsonl",
    purpose="batch",
    size=3,
    created_at=1.5,
    expires_at=2,
    state=FileState.READY,
)
BATCH = BatchRecord(
    batch_id="batch-1",
    owner="tenant:0",
    key_id="0123456789ab",
    endpoint="/v1/completions",
    input_file_id="file-1",
    created_at=1.5,
    expires_at=2,
    metadata={"a": "b"},
    output_life_s=3,
)
RESULT = ResultPart(number=1, writer="router-1", part=0, num_parts=1, data=b"{}", is_good=True)
RECORDS: Sequence[Struct] = (
    CALL,
    KEY,
    LeaseRecord(holder="worker-1", epoch=3),
    LEADER,
    MEMBER,
    RESPONSE,
    Unfinished(router="router-1"),
    FILE,
    BATCH,
    RESULT,
)
UNIONS: Sequence[tuple[Any, str]] = (
    (ControlMessage, "Grant"),
    (ReportMessage, "Progress"),
    (ReportMessage, "Snapshot"),
    (LogMessage, "TokenFrame"),
)


def _decoding(kind: Any) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        message = decode(data, kind)
        # What is let in can be sent on, and is the same then.
        assert _same(decode(encode(message), type(message)), message), message

    return run


def _same(first: Struct, second: Struct) -> bool:
    return bool(msgspec.msgpack.encode(first) == msgspec.msgpack.encode(second))  # NaN is not equal to itself


def _response(data: bytes) -> None:
    unpack(data)


def _unpacking(data: bytes) -> None:
    model_cards._unpack(data)


def _packing(data: bytes) -> None:
    model_cards._unpack(zlib.compress(data))


def _card_seed() -> bytes:
    card = SAMPLES["ModelCard"]
    assert isinstance(card, ModelCard)
    head = encode(msgspec.structs.replace(card, tokenizer=b""))
    return struct.pack("<I", len(head)) + head + card.tokenizer


def _chunk(data: bytes) -> None:
    part = FlightPart(scheduler=SchedulerId("s"), chunk=1, part=0, num_parts=1, data=data)
    for chunk in chunks([encode(part)]):
        STATE.load(chunk.keyframe)


def targets() -> list[Target]:
    kinds = [(type(sample), encode(sample)) for sample in (*SAMPLES.values(), *RECORDS)]
    found = [
        Target(f"wire: {kind.__name__}", [data], mutate_msgpack, _decoding(kind), (ProtocolError,))
        for kind, data in kinds
    ]
    nodes = [encode(LEADER), encode(MEMBER)]
    found.append(Target("wire: a node's record", nodes, mutate_msgpack, _decoding(NodeRecord), (ProtocolError,)))
    for union, name in UNIONS:
        seeds = [encode(SAMPLES[name])]
        found.append(Target(f"wire: {name} of a union", seeds, mutate_msgpack, _decoding(union), (ProtocolError,)))
    every = [data for _, data in kinds]
    for kind in (ApiKey, AccountRecord, ModelCard):
        label = f"wire: anything as {kind.__name__}"
        found.append(Target(label, every, mutate_bytes, _decoding(kind), (ProtocolError,)))
    flight = msgspec.msgpack.encode(Chunk("s", 1, 0.0, 0.0, STATE.fingerprint, STATE.dump([1, {"a": (2, 3)}]), []))
    recording = struct.pack(">I", len(flight)) + flight
    return [
        *found,
        Target("wire: packed ids", [REQUEST.prompt], mutate_bytes, _ids, (ProtocolError,)),
        Target("wire: a packed response", [RESPONSE.response], mutate_bytes, _response, (ProtocolError,)),
        Target("wire: a response", [RESPONSE.response], _repacked, _response, (ProtocolError,)),
        Target("wire: a model card", [_card_seed()], mutate_bytes, _packing, (ProtocolError,)),
        Target("wire: a packed model card", [zlib.compress(_card_seed())], mutate_bytes, _unpacking, (ProtocolError,)),
        Target("wire: a flight recording's chunk", [flight], mutate_msgpack, _chunk, (ProtocolError,)),
        Target("wire: a recording's file", [recording], mutate_bytes, _file, (ProtocolError,)),
    ]


def _repacked(random: Random, data: bytes) -> bytes:
    """What is in it is changed, not the packing."""
    try:
        return zlib.compress(mutate_json(random, zlib.decompressobj().decompress(data, MAX_INPUT_BYTES)))
    except zlib.error:  # it was cut off
        return mutate_bytes(random, data)


def _ids(data: bytes) -> None:
    unpack_ids(data)


def _file(data: bytes) -> None:
    for _ in split(data, "file"):
        pass
