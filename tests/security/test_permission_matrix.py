"""Every user tries everything at a real broker. What may succeed is written down in permission_matrix.txt, and nothing
else does: whoever changes a right sees it there."""

from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.broker_permissions import RIGHTS, Role, permissions_of
from headrace_shared.subjects import BUCKETS, REQUESTS, STREAMS, bucket_stream
from tests.security.operations import EVERY_STREAM, INBOXES, PUBLICATIONS, SUBSCRIPTIONS
from tests.security.raw_client import raw_user

pytestmark = pytest.mark.nats

EXPECTED = {
    tuple(line.split())
    for line in Path(__file__).with_name("permission_matrix.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
"""(role, publish or subscribe, subject)."""


@pytest.mark.parametrize("role", Role)
async def test_a_user_may_do_what_is_written_down_and_nothing_else(
    guarded: NatsServer, tmp_path: Path, role: Role
) -> None:
    assert len(set(PUBLICATIONS)) == len(PUBLICATIONS) and len(PUBLICATIONS) > 300
    async with raw_user(guarded, tmp_path / "keys", role) as client:
        refused = {
            "publish": await client.refused_publications(PUBLICATIONS),
            "subscribe": await client.refused_subscriptions(SUBSCRIPTIONS),
        }
        in_a_group = await client.refused_subscriptions(SUBSCRIPTIONS, queue="workers")
    tried = {"publish": PUBLICATIONS, "subscribe": SUBSCRIPTIONS}
    allowed = {(str(role), verb, name) for verb, names in tried.items() for name in names if name not in refused[verb]}
    assert sorted(allowed) == sorted(line for line in EXPECTED if line[0] == role)
    assert in_a_group == refused["subscribe"], "a queue group is no way round"


def test_nothing_is_allowed_by_a_wildcard_that_reaches_beyond_its_kind() -> None:
    """And nothing is denied: rules that overlap have been holes."""
    for role in Role:
        for subject in (*permissions_of(role).publish, *permissions_of(role).subscribe):
            head, *rest = subject.split(".")
            assert "*" not in head and ">" not in head, subject
            assert ">" not in rest[:-1], subject
            if rest[-1] == ">":
                own = head == f"_INBOX_{role}"
                queue = subject.endswith("REQUESTS.>") and rest[0] in ("ACK", "API")
                bucket = head == "stored" and subject not in permissions_of(role).publish
                assert own or bucket or (queue and role is Role.SCHEDULER), subject
            if head == "$JS" and rest[0] == "API":
                stream = next(token for token in rest if token.isupper() and token in EVERY_STREAM)
                assert stream, subject


def test_the_table_knows_every_stream_and_bucket() -> None:
    from headrace_shared import subjects

    specs = [value for value in vars(subjects).values() if isinstance(value, subjects.StreamSpec)]
    buckets = [value for value in vars(subjects).values() if isinstance(value, subjects.BucketSpec)]
    assert set(specs) == set(STREAMS) and set(buckets) == set(BUCKETS)
    used = {
        stream
        for rights in RIGHTS.values()
        for stream in (
            *rights.reads,
            *rights.deletes_from,
            *rights.takes_from,
            *(bucket_stream(bucket) for bucket, _ in rights.writes),
        )
    }
    assert used == set(EVERY_STREAM), "what nobody uses need not be there"


def test_what_must_never_be_allowed() -> None:
    """In words that do not come from the table."""
    allowed = {(line[0], line[2]) for line in EXPECTED if line[1] == "publish"}
    heard = {(line[0], line[2]) for line in EXPECTED if line[1] == "subscribe"}
    roles = [str(role) for role in Role]
    for call in (
        "STREAM.DELETE",
        "STREAM.RESTORE",
        "STREAM.SNAPSHOT",
        "STREAM.LEADER",
        "STREAM.PEER",
        "META",
        "ACCOUNT",
    ):
        assert not [name for _, name in allowed if name.startswith(f"$JS.API.{call}")], call
    for _, name in allowed | heard:
        assert not name.startswith(("$SYS", "_R_", "_GR_", "$GNR", "$JS.EVENT", "$JS.FC", "_INBOX.")), name
    for role in roles:
        for inbox in INBOXES:
            own = inbox.startswith(f"_INBOX_{role}.")
            assert ((role, inbox) in heard) is own and ((role, inbox) in allowed) is own
    makers = {role for role, name in allowed if ".STREAM.CREATE." in name or ".STREAM.UPDATE." in name}
    assert makers == {"scheduler"}
    takers = {role for role, name in allowed if "$JS.ACK" in name or ".MSG.NEXT." in name}
    assert takers == {"scheduler"}
    said_by_workers = [name for role, name in allowed if role == "worker"]
    assert not [name for name in said_by_workers if "CONSUMER" in name]
    assert not [name for name in said_by_workers if name.startswith(("requests", "commands", "grants"))]
    heard_by_workers = {name.split(".")[0] for role, name in heard if role == "worker"}
    assert heard_by_workers == {"grants", "commands", "_INBOX_worker", "stored"}
    watched_by_workers = {name.split(".")[1] for role, name in heard if role == "worker" and name.startswith("stored")}
    assert watched_by_workers == {"GROUPS", "ADAPTERS"}
    assert not [name for _, name in heard if name.startswith("$KV")]
    assert not [name for _, name in allowed if name.startswith("stored")], "only the broker itself says what is stored"
    # What comes out of a stream as it was stored, or without a body, could be anybody's word wherever it is sent.
    may_speak_for_others = {role for role, name in allowed if ".DIRECT.GET." in name or ".CONSUMER.CREATE." in name}
    assert may_speak_for_others == {"scheduler", "operator"}
    makers_of_consumers = {(role, name.split(".")[4]) for role, name in allowed if ".CONSUMER.CREATE." in name}
    assert makers_of_consumers == {("scheduler", REQUESTS)}
    assert {role for role, name in allowed if ".STREAM.PURGE." in name} == {"router"}
    assert not [name for _, name in allowed if ".STREAM.PURGE.KV_" in name or name.endswith("PURGE.REQUESTS")]
    assert {role for role, name in heard if name.startswith("tokens")} == {"router"}
    assert {role for role, name in allowed if name.startswith("commands")} == {"autoscaler", "operator"}
    assert {role for role, name in allowed if name.startswith("grants")} == {"scheduler"}
    assert {role for role, name in allowed if name.startswith("$KV.KEYS")} == {"operator"}
