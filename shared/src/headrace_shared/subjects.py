"""Every subject, stream, consumer and bucket, and how each is configured. No subject string exists anywhere else.

    requests.<model>.<lane>.<queue>       stream REQUESTS: the durable work queue; <queue>: see `Queue`
    tokens.<router>.<request>             stream TOKENS: the token log; a router holds one wildcard subscription
    cancel.<request>                      stream CANCELS: tombstones, heard live by every scheduler
    attached.<router>                     Attached
    loads.<router>                        RouterLoad
    dead.<model>.<request>                stream DEAD: requests that were given up, for an operator
    grants.<worker>                       Adopt, Grant, DrainVerdict
    commands.<worker>                     WorkerCommand
    replies.<sender>                      CommandReply
    progress.<scheduler>                  Progress, Snapshot
    workers.<model>.<worker>              Hello
    telemetry.<service>.<id>              Telemetry
    stories.<scheduler>                   StoryQuery
    told.<router>                         Story
    flight.<scheduler>                    FlightPart, kept by the stream FLIGHT: what the schedulers' cores saw and did
    batchresults.<batch>                  stream BATCH_RESULTS: what has come of a batch's lines
    $O.<bucket>.C.<object>, ….M.<name>    stream OBJ_<bucket>: pieces and descriptions of stored objects
    $KV.<bucket>.<key>                    stream KV_<bucket>: a key-value bucket
    stored.<bucket>.<key>                 said by the broker: what that stream has just stored

Names that come from outside (models) pass through `subject_token`; ids of ours are hexadecimal or `<kind>-<hex>`.
"""

import base64
import hashlib
import re
from typing import NamedTuple

from headrace_shared.messages import Lane, RequestId, RouterId, SchedulerId, WorkerId

NUM_PARTITIONS = 8
"""Requests with equal first blocks share a partition, so that they can meet the same scheduler."""
NUM_TENANT_PARTITIONS = 4
"""Of each flow but the first. Fewer, since each is a consumer at the broker."""

_SAFE_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")

MIB = 1024 * 1024


class StreamSpec(NamedTuple):
    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    """Acknowledged messages are deleted, each message has one consumer, and a full stream refuses new messages."""
    in_memory: bool = False
    max_messages: int | None = None
    max_bytes: int | None = None
    max_age_s: float | None = None
    max_per_subject: int | None = None
    is_lossless: bool = False
    """A full stream refuses new messages, as a work queue does, and does not drop its oldest."""
    allows_rollup: bool = False
    """A message may say that it replaces all others of its subject."""
    allows_purge: bool = False
    """Its owner removes whole subjects."""


class ConsumerSpec(NamedTuple):
    """A durable pull consumer of a work queue."""

    stream: str
    name: str
    subject: str
    ack_wait_s: float
    max_ack_pending: int


class BucketSpec(NamedTuple):
    """A key-value bucket; keeps only the last revision of each key."""

    name: str
    max_bytes: int
    ttl_s: float | None = None
    in_memory: bool = False


def object_stream(bucket: str) -> str:
    """The stream that holds an object store. Names and layout are those of NATS' own object stores (ADR-20)."""
    return f"OBJ_{bucket}"


def objects_spec(bucket: str, max_bytes: int, max_age_s: float | None = None) -> StreamSpec:
    subjects = (f"$O.{bucket}.C.>", f"$O.{bucket}.M.>")
    return StreamSpec(
        object_stream(bucket),
        subjects,
        max_bytes=max_bytes,
        max_age_s=max_age_s,
        is_lossless=True,
        allows_rollup=True,
        allows_purge=True,
    )


TOKEN_LOG_S = 900.0
"""How long tokens are kept, unless there are too many: longer than a request runs, so that its log is whole."""
TOKENS = StreamSpec("TOKENS", ("tokens.*.*",), in_memory=True, max_bytes=256 * MIB, max_age_s=TOKEN_LOG_S)
MAX_TOMBSTONES = 32
"""Of one request: one for each choice that a stop string has ended, and for the whole of it."""
CANCELS = StreamSpec(
    "CANCELS", ("cancel.*",), in_memory=True, max_bytes=16 * MIB, max_age_s=3600.0, max_per_subject=MAX_TOMBSTONES
)
DEAD = StreamSpec(
    "DEAD", ("dead.*.*",), max_messages=10_000, max_bytes=256 * MIB, max_age_s=30 * 86_400.0, max_per_subject=1
)
FLIGHT = StreamSpec("FLIGHT", ("flight.*",), in_memory=True, max_bytes=64 * MIB, max_age_s=3600.0)
LEASES = BucketSpec("LEASES", max_bytes=16 * MIB)
LOSSES = BucketSpec("LOSSES", max_bytes=16 * MIB, ttl_s=86_400.0)
"""request -> LossRecord."""
MODELS = BucketSpec("MODELS", max_bytes=512 * MIB)
ADAPTERS = BucketSpec("ADAPTERS", max_bytes=16 * MIB)
"""LoRA adapters by name: which the workers are to have."""
GROUPS = BucketSpec("GROUPS", max_bytes=16 * MIB, ttl_s=86_400.0)
"""Who lives writes its record again every second; the others go in the end."""
IDEMPOTENCY = BucketSpec("IDEMPOTENCY", max_bytes=1024 * MIB, ttl_s=24 * 3600.0)
"""Idempotency keys: caller and key -> which call they stand for."""
CALLS = BucketSpec("CALLS", max_bytes=256 * MIB, ttl_s=2 * TOKEN_LOG_S)
"""Calls that may be continued at another router: how their answer is written."""
RESPONSES = BucketSpec("RESPONSES", max_bytes=1024 * MIB, ttl_s=86_400.0)
"""Responses that their clients may ask for again, or go on from: a day after they were last written."""
UNFINISHED = BucketSpec("UNFINISHED", max_bytes=16 * MIB, ttl_s=86_400.0)
"""Background responses without an end yet: which router reads each."""
RESPONSE_SHARES = BucketSpec("RESPONSE_SHARES", max_bytes=16 * MIB, ttl_s=26 * 3600.0)
"""How much of RESPONSES each owner has filled, as each router tells it. Longer than responses are kept."""
KEYS = BucketSpec("KEYS", max_bytes=64 * MIB)
"""API keys by id, without their secrets."""
ACCOUNTS = BucketSpec("ACCOUNTS", max_bytes=64 * MIB, ttl_s=2 * 86_400.0)
"""What each API key has used: longer than a day, for the daily quota."""
FILE_LIFE_S = 30 * 86_400.0
"""Longest life of a file that a client has stored."""
_FILE_ROOM_S = 2 * 86_400.0
"""What is left behind by whoever died while storing or deleting goes with the streams' own age limit."""
FILES = BucketSpec("FILES", max_bytes=64 * MIB, ttl_s=FILE_LIFE_S + _FILE_ROOM_S)
"""Files by owner and id: FileRecord. Their content is in the object store of the same name."""
BATCHES = BucketSpec("BATCHES", max_bytes=128 * MIB, ttl_s=FILE_LIFE_S + _FILE_ROOM_S)
"""Batches by owner and id: BatchRecord."""
BATCH_LEASES = BucketSpec("BATCH_LEASES", max_bytes=16 * MIB, ttl_s=7 * 86_400.0)
"""Which router runs which batch."""
BATCH_RESULTS = StreamSpec(
    "BATCH_RESULTS",
    ("batchresults.*",),
    max_bytes=1024 * MIB,
    max_age_s=4 * 86_400.0,
    is_lossless=True,
    allows_purge=True,
)
"""Longer than a batch may take. Purged when its files are written."""
FILE_CONTENT = objects_spec(FILES.name, 2048 * MIB, FILE_LIFE_S + _FILE_ROOM_S)

BUCKETS = (
    *(LEASES, LOSSES, MODELS, GROUPS, ADAPTERS, IDEMPOTENCY, CALLS, KEYS, ACCOUNTS),
    *(RESPONSES, UNFINISHED, RESPONSE_SHARES, FILES, BATCHES, BATCH_LEASES),
)
STREAMS = (TOKENS, CANCELS, DEAD, FLIGHT, FILE_CONTENT, BATCH_RESULTS)
"""All but the queue, whose size is a setting (`requests_stream`)."""

REQUESTS = "REQUESTS"
"""The stream of all queues (`requests_stream`)."""
ALL_REQUESTS = "requests.*.*.*"
DEDUPE_WINDOW_S = 120.0
"""A message id is stored once within this time."""
ACK_WAIT_S = 4.0
"""Renewed by `in_progress` several times as often; a dead scheduler's requests that no worker has yet are offered again
after this. Longer than a broker's restart or a short freeze, which cost nobody what he holds."""
MAX_ACK_PENDING = 100_000
"""No bound of ours: schedulers pull only what they have room for."""


def requests_stream(max_messages: int, max_bytes: int) -> StreamSpec:
    return StreamSpec(REQUESTS, (ALL_REQUESTS,), work_queue=True, max_messages=max_messages, max_bytes=max_bytes)


def batch_requests() -> str:
    """The queues of the batch lane, of all models."""
    return f"requests.*.{Lane.BATCH}.*"


class Queue(NamedTuple):
    """One of the queues of a model: a subject, and a durable consumer with its lag. A queue keeps its order, so whoever
    must not wait for each other are in different ones: the flows of tenants, and the lanes."""

    model: str
    lane: Lane
    flow: int = 0
    """0: requests without a tenant."""
    partition: int = 0

    @property
    def _token(self) -> str:
        assert 0 <= self.partition < num_partitions(self.lane, self.flow), self
        return f"f{self.flow}p{self.partition}" if self.flow else str(self.partition)

    @property
    def subject(self) -> str:
        return f"requests.{subject_token(self.model)}.{self.lane}.{self._token}"

    @property
    def consumer(self) -> ConsumerSpec:
        name = f"{_lane_name(self.model, self.lane)}-{self._token}"
        return ConsumerSpec(REQUESTS, name, self.subject, ACK_WAIT_S, MAX_ACK_PENDING)


_QUEUE_TOKEN = re.compile(r"(?:f([1-9][0-9]?)p)?([0-9])")


def num_partitions(lane: Lane, flow: int) -> int:
    if lane is Lane.BATCH:
        return 1
    return NUM_TENANT_PARTITIONS if flow else NUM_PARTITIONS


def queues_of(model: str, lane: Lane, flow: int) -> list[Queue]:
    return [Queue(model, lane, flow, partition) for partition in range(num_partitions(lane, flow))]


def queue_of(model: str, lane: Lane, consumer: str) -> Queue | None:
    """Whose consumer this is, if it is one of that model and lane."""
    start = _lane_name(model, lane) + "-"
    match = _QUEUE_TOKEN.fullmatch(consumer.removeprefix(start)) if consumer.startswith(start) else None
    if match is None:
        return None
    queue = Queue(model, lane, int(match[1] or 0), int(match[2]))
    return queue if queue.partition < num_partitions(lane, queue.flow) else None


def former_consumer(model: str, lane: Lane) -> str:
    """Of the whole lane, as versions had it that knew no tenants. It must go before those of the queues can be made."""
    return _lane_name(model, lane)


def _lane_name(model: str, lane: Lane) -> str:
    return f"{subject_token(model)}-{lane}"


def tokens_subject(router: RouterId, request: RequestId) -> str:
    return f"tokens.{router}.{request}"


def all_tokens_of(router: RouterId) -> str:
    return f"tokens.{router}.*"


def cancel_subject(request: RequestId) -> str:
    return f"cancel.{request}"


ALL_CANCELS = "cancel.*"


def dead_subject(model: str, request: RequestId) -> str:
    return f"dead.{subject_token(model)}.{request}"


def dead_subject_of(request: str) -> str:
    """Of any model."""
    return f"dead.*.{request}"


ALL_DEAD = "dead.*.*"


def attached_subject(router: RouterId) -> str:
    return f"attached.{router}"


ALL_ATTACHED = "attached.*"


def loads_subject(router: RouterId) -> str:
    return f"loads.{router}"


ALL_LOADS = "loads.*"


def grants_subject(worker: WorkerId) -> str:
    return f"grants.{worker}"


def commands_subject(worker: WorkerId) -> str:
    return f"commands.{worker}"


def replies_subject(sender: str) -> str:
    """`sender`: one token, such as a service id."""
    return f"replies.{sender}"


def progress_subject(scheduler: SchedulerId) -> str:
    return f"progress.{scheduler}"


def hello_subject(model: str, worker: WorkerId) -> str:
    return f"workers.{subject_token(model)}.{worker}"


def all_hellos_of(model: str) -> str:
    return f"workers.{subject_token(model)}.*"


ALL_HELLOS = "workers.*.*"


def telemetry_subject(service: str, service_id: str) -> str:
    return f"telemetry.{service}.{service_id}"


ALL_TELEMETRY = "telemetry.*.*"


def story_query_subject(scheduler: SchedulerId) -> str:
    return f"stories.{scheduler}"


def story_subject(router: RouterId) -> str:
    return f"told.{router}"


def batch_results_subject(batch: str) -> str:
    return f"batchresults.{batch}"


def flight_subject(scheduler: SchedulerId) -> str:
    return f"flight.{scheduler}"


ALL_FLIGHTS = "flight.*"


def bucket_stream(bucket: str) -> str:
    """The stream that holds a key-value bucket."""
    return f"KV_{bucket}"


def bucket_subject(bucket: str, key: str) -> str:
    """Of one key, or with `>` of all."""
    return f"$KV.{bucket}.{key}"


def bucket_key(bucket: str, subject: str) -> str:
    """The inverse of `bucket_subject`."""
    return subject[len(bucket_subject(bucket, "")) :]


def stored_subject(bucket: str, key: str) -> str:
    """Where the broker tells that a value was stored: the value, with its place in the bucket's stream. Of one key, or
    with `>` of all."""
    return f"stored.{bucket}.{key}"


def stored_key(bucket: str, subject: str) -> str:
    """The inverse of `stored_subject`."""
    return subject[len(stored_subject(bucket, "")) :]


def object_chunks_subject(bucket: str, nuid: str) -> str:
    return f"$O.{bucket}.C.{nuid}"


def object_info_subject(bucket: str, name: str) -> str:
    """Any name makes one safe token."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def all_object_infos(bucket: str) -> str:
    return f"$O.{bucket}.M.*"


AUTOSCALER_LEASE = "autoscaler"
"""Whoever holds it acts."""


def worker_lease_key(worker: WorkerId) -> str:
    return f"worker.{worker}"


def group_key(group: str, node_rank: int) -> str:
    """Of one machine's part of a worker that is spread over several."""
    return f"{subject_token(group)}.{node_rank}"


def model_card_key(model: str, part: int) -> str:
    """Cards are compressed and split into parts that fit a message; part 0 says how many there are."""
    return f"{subject_token(model)}.{part}"


def adapter_key(name: str) -> str:
    return subject_token(name)


def subject_token(name: str) -> str:
    """A token that is safe in subjects and durable names, and different for different names."""
    if _SAFE_TOKEN.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:48] + "_" + digest
