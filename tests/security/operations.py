"""Everything that somebody could try at the broker: concrete subjects to publish, and patterns to subscribe to."""

from headrace_shared import subjects
from headrace_shared.broker_permissions import Role, inbox_prefix
from headrace_shared.messages import Lane, RequestId, RouterId, SchedulerId, WorkerId
from headrace_shared.subjects import BUCKETS, REQUESTS, STREAMS, Queue, bucket_stream, bucket_subject, stored_subject

REQUEST = RequestId("0123456789abcdef0123456789abcdef")
ROUTER = RouterId("router-1")
SCHEDULER = SchedulerId("scheduler-1")
WORKER = WorkerId("worker-1")
EVERY_STREAM = (REQUESTS, *(spec.name for spec in STREAMS), *(bucket_stream(spec.name) for spec in BUCKETS))
KEYS = {
    "LEASES": (subjects.worker_lease_key(WORKER), subjects.AUTOSCALER_LEASE),
    "MODELS": (subjects.model_card_key("m", 0),),
    "GROUPS": (subjects.group_key("g", 0),),
    "RESPONSE_SHARES": ("owner.writer",),
    "BATCH_LEASES": ("batch.batch-1", "tidying"),
    "FILES": ("owner.file",),
    "BATCHES": ("owner.batch",),
}

OWN = (
    Queue("m", Lane.INTERACTIVE).subject,
    Queue("m", Lane.BATCH).subject,
    subjects.tokens_subject(ROUTER, REQUEST),
    subjects.cancel_subject(REQUEST),
    subjects.attached_subject(ROUTER),
    subjects.loads_subject(ROUTER),
    subjects.dead_subject("m", REQUEST),
    subjects.grants_subject(WORKER),
    subjects.commands_subject(WORKER),
    subjects.replies_subject("command-1"),
    subjects.progress_subject(SCHEDULER),
    subjects.hello_subject("m", WORKER),
    *(subjects.telemetry_subject(role, f"{role}-1") for role in Role),
    subjects.story_query_subject(SCHEDULER),
    subjects.story_subject(ROUTER),
    subjects.flight_subject(SCHEDULER),
    subjects.batch_results_subject("batch-1"),
    subjects.object_chunks_subject("FILES", "object"),
    subjects.object_info_subject("FILES", "name"),
    *(
        of(spec.name, key)
        for of in (bucket_subject, stored_subject)
        for spec in BUCKETS
        for key in KEYS.get(spec.name, ("key",))
    ),
)
"""Of our own making."""

_OF_A_STREAM = (
    "STREAM.INFO.{}",
    "STREAM.CREATE.{}",
    "STREAM.UPDATE.{}",
    "STREAM.DELETE.{}",
    "STREAM.PURGE.{}",
    "STREAM.SNAPSHOT.{}",
    "STREAM.RESTORE.{}",
    "STREAM.MSG.GET.{}",
    "STREAM.MSG.DELETE.{}",
    "STREAM.LEADER.STEPDOWN.{}",
    "STREAM.PEER.REMOVE.{}",
    "DIRECT.GET.{}",
    "DIRECT.GET.{}.any.subject",
    "CONSUMER.CREATE.{}",
    "CONSUMER.CREATE.{}.c",
    "CONSUMER.CREATE.{}.c.any.filter",
    "CONSUMER.DURABLE.CREATE.{}.c",
    "CONSUMER.DELETE.{}.c",
    "CONSUMER.INFO.{}.c",
    "CONSUMER.LIST.{}",
    "CONSUMER.NAMES.{}",
    "CONSUMER.MSG.NEXT.{}.c",
    "CONSUMER.PAUSE.{}.c",
    "CONSUMER.UNPIN.{}.c",
    "CONSUMER.RESET.{}.c",
    "CONSUMER.LEADER.STEPDOWN.{}.c",
)
OF_JETSTREAM = (
    *(f"$JS.API.{call.format(stream)}" for call in _OF_A_STREAM for stream in (*EVERY_STREAM, "OTHER")),
    *(f"$JS.API.{call}" for call in ("INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.TEMPLATE.CREATE.t")),
    *(f"$JS.API.{call}" for call in ("META.LEADER.STEPDOWN", "SERVER.REMOVE", "ACCOUNT.PURGE.x")),
    *(f"$JS.ACK.{stream}.c.1.1.1.1.0" for stream in EVERY_STREAM),
    *(f"$JS.ACK._.hash.{stream}.c.1.1.1.1.0" for stream in EVERY_STREAM),
    "$JS.FC.REQUESTS.c.1",
    "$JS.EVENT.ADVISORY.API",
    "$JS.SNAPSHOT.ACK.x",
)
OF_THE_SYSTEM = (
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.SERVER.X.RELOAD",
    "$SYS.REQ.ACCOUNT.x.CONNZ",
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.ACCOUNT.x.CONNECT",
    "_R_.x",
    "_GR_.x.y.z",
    "$GNR.x",
)
INBOXES = ("_INBOX.x", "_INBOX.x.1", *(f"{inbox_prefix(role)}.x.1" for role in Role))
FOREIGN = ("anything", "a.b.c")

PUBLICATIONS = (*OWN, *OF_JETSTREAM, *OF_THE_SYSTEM, *INBOXES, *FOREIGN)
SUBSCRIPTIONS = (
    *PUBLICATIONS,
    *(">", "*", "*.*", "*.*.*", "*.*.*.*", "*.>"),
    *("$SYS.>", "$SYS.*", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$JS.EVENT.>", "$KV.>", "$KV.KEYS.>", "$KV.*.*"),
    *("stored.*.>", "stored.*.*", *(stored_subject(spec.name, ">") for spec in BUCKETS)),
    *("_INBOX.>", "_INBOX.*", "_INBOX.*.*", *(f"{inbox_prefix(role)}.>" for role in Role)),
    *(f"{head}.>" for head in sorted({subject.split(".")[0] for subject in OWN} - {"$KV", "$O"})),
    subjects.all_tokens_of(ROUTER),
    subjects.ALL_CANCELS,
    subjects.ALL_ATTACHED,
    subjects.ALL_LOADS,
    subjects.ALL_HELLOS,
    subjects.ALL_TELEMETRY,
)
