"""Who may do what at the broker: from each service to the exact subjects that it may publish and subscribe to. Pure.

One table, in the terms of `bus.Bus`; what that means in subjects of the JetStream API follows from it. Everything is
allowed by name and nothing is denied, so that no wildcard of one rule can cut into another. Why the table is as it is:

- A service that may make or change a stream can copy any other stream into it, and one that may make a consumer can
  have it read anything of that stream: streams, buckets and the queue's consumers are made by schedulers, which see
  everything anyway. Nobody may delete, restore or copy a stream, and only its owner may purge one.
- The broker sends its answers wherever an asker says, and does not check whether he may publish there. So whose word is
  not everybody's anyway gets only such answers as are neither messages of ours nor calls of the broker's own: JSON that
  names its kind. He reads nothing directly, and makes no consumer, since that would be delivered anywhere, too; buckets
  are watched by what the broker says of what it has stored.
- Only schedulers take from the queue and acknowledge. Routers may delete from it what they queued, before it is taken.
- Workers read no stream but model cards, adapters and the places of their groups.
- Whoever shares a user shares its rights: a worker could listen to the grants of another one.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

from headrace_shared import subjects
from headrace_shared.messages import RequestId, RouterId, SchedulerId, WorkerId
from headrace_shared.subjects import (
    ACCOUNTS,
    ADAPTERS,
    BATCH_LEASES,
    BATCH_RESULTS,
    BATCHES,
    CALLS,
    CANCELS,
    DEAD,
    FILE_CONTENT,
    FILES,
    FLIGHT,
    GROUPS,
    IDEMPOTENCY,
    KEYS,
    LEASES,
    LOSSES,
    MODELS,
    REQUESTS,
    RESPONSE_SHARES,
    RESPONSES,
    TOKENS,
    UNFINISHED,
)


class Role(StrEnum):
    """A user of the broker. The services' names, and whoever uses the commands."""

    ROUTER = "router"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    AUTOSCALER = "autoscaler"
    OPERATOR = "operator"


MAKERS = frozenset({Role.SCHEDULER})
"""Who makes streams and buckets. The others wait until they are there."""


DIRECT_READERS = frozenset({Role.SCHEDULER, Role.OPERATOR})
"""Who gets messages out of streams as they were stored, and so may have the broker say anything to anybody. Schedulers
command the workers, and may copy any stream into any other; operators write API keys. The others read in envelopes."""


class Permissions(NamedTuple):
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class Rights(NamedTuple):
    """What one role does."""

    sends: tuple[str, ...]
    """Subjects of messages of its own, those that streams keep included."""
    hears: tuple[str, ...]
    looks_at: tuple[str, ...]
    """Streams whose state it asks for."""
    reads: tuple[str, ...] = ()
    """Streams whose messages it reads one by one."""
    deletes_from: tuple[str, ...] = ()
    """Streams of which it deletes single messages, which takes looking whether they are there."""
    purges: tuple[str, ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    """Bucket and keys."""
    watches: tuple[str, ...] = ()
    """Buckets that it reads, and hears of what is stored in them."""
    takes_from: tuple[str, ...] = ()
    """Work queues: their consumers are its business, and so is the acknowledgement."""
    counts: tuple[str, ...] = ()
    """Work queues whose consumers it lists."""
    makes: tuple[str, ...] = ()
    """Streams, those of buckets included."""


_ANY_REQUEST = RequestId("*")
_ANY_ROUTER = RouterId("*")
_ANY_SCHEDULER = SchedulerId("*")
_ANY_WORKER = WorkerId("*")
_EVERY_BUCKET = tuple(subjects.bucket_stream(spec.name) for spec in subjects.BUCKETS)
_OF_ROUTERS = (ACCOUNTS, CALLS, IDEMPOTENCY, RESPONSES, UNFINISHED, FILES, BATCHES, BATCH_LEASES)
"""Buckets that nobody else has to do with."""
_EVERY_STREAM = (REQUESTS, *(spec.name for spec in subjects.STREAMS), *_EVERY_BUCKET)


def _buckets(*specs: subjects.BucketSpec) -> tuple[str, ...]:
    return tuple(subjects.bucket_stream(spec.name) for spec in specs)


RIGHTS = {
    Role.ROUTER: Rights(
        sends=(
            subjects.ALL_REQUESTS,
            subjects.tokens_subject(_ANY_ROUTER, _ANY_REQUEST),
            subjects.ALL_CANCELS,
            subjects.ALL_ATTACHED,
            subjects.ALL_LOADS,
            subjects.story_query_subject(_ANY_SCHEDULER),
            subjects.object_chunks_subject(FILES.name, "*"),
            subjects.all_object_infos(FILES.name),
            subjects.batch_results_subject("*"),
            subjects.telemetry_subject(Role.ROUTER, "*"),
        ),
        hears=(
            subjects.tokens_subject(_ANY_ROUTER, _ANY_REQUEST),
            subjects.ALL_ATTACHED,
            subjects.ALL_LOADS,
            subjects.ALL_HELLOS,
            subjects.ALL_TELEMETRY,
            subjects.story_subject(_ANY_ROUTER),
        ),
        looks_at=(
            REQUESTS,
            *(spec.name for spec in (TOKENS, CANCELS, FILE_CONTENT, BATCH_RESULTS)),
            *_buckets(KEYS, MODELS, ADAPTERS, RESPONSE_SHARES, *_OF_ROUTERS),
        ),
        reads=(
            *(spec.name for spec in (TOKENS, FILE_CONTENT, BATCH_RESULTS)),
            *_buckets(MODELS, ADAPTERS, *_OF_ROUTERS),
        ),
        deletes_from=(REQUESTS,),
        purges=(FILE_CONTENT.name, BATCH_RESULTS.name),
        writes=(
            *((spec.name, "*") for spec in (ADAPTERS, ACCOUNTS, CALLS, IDEMPOTENCY, RESPONSES, UNFINISHED)),
            *((spec.name, "*.*") for spec in (RESPONSE_SHARES, FILES, BATCHES)),
            (BATCH_LEASES.name, "*"),
            (BATCH_LEASES.name, "batch.*"),
        ),
        watches=(
            *(spec.name for spec in (KEYS, MODELS, ADAPTERS, ACCOUNTS)),
            *(spec.name for spec in (UNFINISHED, RESPONSE_SHARES, BATCHES, BATCH_LEASES)),
        ),
        counts=(REQUESTS,),
    ),
    Role.SCHEDULER: Rights(
        sends=(
            subjects.tokens_subject(_ANY_ROUTER, _ANY_REQUEST),
            subjects.ALL_DEAD,
            subjects.grants_subject(_ANY_WORKER),
            subjects.story_subject(_ANY_ROUTER),
            subjects.ALL_FLIGHTS,
            subjects.telemetry_subject(Role.SCHEDULER, "*"),
        ),
        hears=(
            subjects.progress_subject(_ANY_SCHEDULER),
            subjects.ALL_HELLOS,
            subjects.ALL_CANCELS,
            subjects.ALL_ATTACHED,
            subjects.story_query_subject(_ANY_SCHEDULER),
            subjects.telemetry_subject(Role.ROUTER, "*"),
            subjects.telemetry_subject(Role.SCHEDULER, "*"),
        ),
        looks_at=_EVERY_STREAM,
        reads=(TOKENS.name, CANCELS.name, FLIGHT.name, *_buckets(LEASES, LOSSES)),
        deletes_from=(REQUESTS,),
        writes=((LEASES.name, subjects.worker_lease_key(_ANY_WORKER)), (LOSSES.name, "*")),
        watches=(LEASES.name, KEYS.name),
        takes_from=(REQUESTS,),
        counts=(REQUESTS,),
        makes=_EVERY_STREAM,
    ),
    Role.WORKER: Rights(
        sends=(
            subjects.tokens_subject(_ANY_ROUTER, _ANY_REQUEST),
            subjects.progress_subject(_ANY_SCHEDULER),
            subjects.ALL_HELLOS,
            subjects.replies_subject("*"),
            subjects.telemetry_subject(Role.WORKER, "*"),
        ),
        hears=(subjects.grants_subject(_ANY_WORKER), subjects.commands_subject(_ANY_WORKER)),
        looks_at=(TOKENS.name, *_buckets(MODELS, GROUPS, ADAPTERS)),
        reads=_buckets(MODELS, GROUPS, ADAPTERS),
        writes=((MODELS.name, "*.*"), (GROUPS.name, "*.*"), (ADAPTERS.name, "*")),
        watches=(GROUPS.name, ADAPTERS.name),
    ),
    Role.AUTOSCALER: Rights(
        sends=(subjects.commands_subject(_ANY_WORKER), subjects.telemetry_subject(Role.AUTOSCALER, "*")),
        hears=(subjects.ALL_HELLOS, subjects.ALL_TELEMETRY),
        looks_at=_buckets(LEASES),
        reads=_buckets(LEASES),
        writes=((LEASES.name, subjects.AUTOSCALER_LEASE),),
        watches=(LEASES.name,),
        counts=(REQUESTS,),
    ),
    Role.OPERATOR: Rights(
        sends=(subjects.commands_subject(_ANY_WORKER), subjects.batch_requests()),
        hears=(subjects.replies_subject("*"), subjects.ALL_HELLOS, subjects.ALL_TELEMETRY),
        looks_at=_EVERY_STREAM,
        reads=(DEAD.name, FLIGHT.name, *_buckets(KEYS, MODELS)),
        deletes_from=(DEAD.name,),
        writes=((KEYS.name, "*"), (MODELS.name, "*.*")),
        counts=(REQUESTS,),
    ),
}


def inbox_prefix(role: Role) -> str:
    """Where the replies to a role's questions arrive; nobody else may listen there."""
    return f"_INBOX_{role}"


def twins_subject(service: str, service_id: str) -> str:
    """What processes of one id tell each other: among the inboxes of their role, for which nobody needs a further
    right."""
    return f"_INBOX_{service}.twins.{service_id}"


def permissions_of(role: Role) -> Permissions:
    rights = RIGHTS[role]
    inbox = f"{inbox_prefix(role)}.>"
    reading = _directly if role in DIRECT_READERS else _in_envelopes
    publish = [
        # To itself, as a sign of life of the broker.
        inbox,
        *rights.sends,
        *(subjects.bucket_subject(bucket, key) for bucket, key in rights.writes),
        *_api(rights.looks_at, lambda stream: (f"STREAM.INFO.{stream}",)),
        *_api((*rights.reads, *map(subjects.bucket_stream, rights.watches)), reading),
        *_api(rights.deletes_from, lambda stream: (f"STREAM.MSG.DELETE.{stream}", *reading(stream))),
        *_api(rights.purges, lambda stream: (f"STREAM.PURGE.{stream}",)),
        *_api(rights.counts, lambda stream: (f"CONSUMER.LIST.{stream}",)),
        *_api(rights.takes_from, _consuming),
        # Both forms that the broker may use: the other has domain and account before the stream.
        *(f"$JS.ACK.{where}{stream}.>" for stream in rights.takes_from for where in ("", "*.*.")),
        *_api(rights.makes, lambda stream: (f"STREAM.CREATE.{stream}", f"STREAM.UPDATE.{stream}")),
    ]
    watched = (subjects.stored_subject(bucket, ">") for bucket in rights.watches)
    return Permissions(_unique(publish), _unique((inbox, *rights.hears, *watched)))


def _in_envelopes(stream: str) -> tuple[str, ...]:
    return (f"STREAM.MSG.GET.{stream}",)


def _directly(stream: str) -> tuple[str, ...]:
    """That something is not there, only an envelope surely tells."""
    return (f"DIRECT.GET.{stream}", *_in_envelopes(stream))


def _consuming(stream: str) -> tuple[str, ...]:
    calls = ("CREATE.{}.>", "DELETE.{}.*", "INFO.{}.*", "MSG.NEXT.{}.*")
    return tuple("CONSUMER." + call.format(stream) for call in calls)


def _api(streams: Iterable[str], calls: Callable[[str], tuple[str, ...]]) -> list[str]:
    return [f"$JS.API.{call}" for stream in streams for call in calls(stream)]


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
