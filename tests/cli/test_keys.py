"""`headrace keys` on a real broker."""

import json
from collections.abc import AsyncIterator

import pytest

from headrace_shared.api_keys import ApiKey, is_secret_of, parse_key
from headrace_shared.broker import NatsServer
from headrace_shared.codec import decode
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import KEYS
from tests.cli.broker_command import BrokerCommand, broker_command

pytestmark = pytest.mark.nats


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    yield bus
    await bus.close()


@pytest.fixture
def headrace_keys(nats_server: NatsServer, capsys: pytest.CaptureFixture[str]) -> BrokerCommand:
    return broker_command("keys", nats_server.url, capsys)


async def test_a_key_is_shown_once_and_its_secret_is_stored_nowhere(bus: NatsBus, headrace_keys: BrokerCommand) -> None:
    assert "start the services first" in (await headrace_keys("list")).err
    await bus.ensure_bucket(KEYS)
    made = await headrace_keys("create", "--name", "web", "--requests-per-minute", "60", "--models", "a,b")
    assert made.code == 0, made.err
    key = parse_key(made.out.splitlines()[0])
    assert key is not None and len(key.secret) == 43
    (entry,) = await bus.entries(KEYS.name)
    assert key.secret.encode() not in entry.value
    record = decode(entry.value, ApiKey)
    assert is_secret_of(record, key.secret) and not is_secret_of(record, key.secret[:-1] + "_")
    assert (record.tenant, record.models, record.requests_per_minute) == ("web", ("a", "b"), 60)
    for listed in (await headrace_keys("list"), await headrace_keys("list", "--json")):
        assert key.key_id in listed.out and key.secret not in listed.out and "secret" not in listed.out


async def test_administrators_are_made_by_an_explicit_word(bus: NatsBus, headrace_keys: BrokerCommand) -> None:
    await bus.ensure_bucket(KEYS)
    for name, words in (("plain", ()), ("root", ("--admin",))):
        assert (await headrace_keys("create", "--name", name, *words)).code == 0
    records = [decode(entry.value, ApiKey) for entry in await bus.entries(KEYS.name)]
    assert {record.name: record.is_admin for record in records} == {"plain": False, "root": True}


async def test_tenants_have_queues_of_their_own_and_names_are_unique(
    bus: NatsBus, headrace_keys: BrokerCommand
) -> None:
    await bus.ensure_bucket(KEYS)
    for name, tenant in (("one", "a"), ("two", "b"), ("three", "a")):
        assert (await headrace_keys("create", "--name", name, "--tenant", tenant)).code == 0
    again = await headrace_keys("create", "--name", "two")
    assert again.code == 1 and "revoke it first" in again.err
    flows = {key.name: key.flow for key in (decode(entry.value, ApiKey) for entry in await bus.entries(KEYS.name))}
    assert flows["one"] == flows["three"] != flows["two"] and min(flows.values()) >= 1


async def test_revoked_keys_are_gone(bus: NatsBus, headrace_keys: BrokerCommand) -> None:
    await bus.ensure_bucket(KEYS)
    made = json.loads((await headrace_keys("create", "--name", "one", "--json", "--priority", "high")).out)
    assert made["priority"] == "high" and parse_key(made["key"]) is not None
    assert (await headrace_keys("create", "--name", "two")).code == 0
    revoked = await headrace_keys("revoke", made["key_id"], "two")
    assert revoked.code == 0 and revoked.out.count("is revoked") == 2
    assert await bus.entries(KEYS.name) == []
    assert "no key one" in (await headrace_keys("revoke", "one")).err


async def test_an_unreadable_key_is_in_nobodys_way_and_can_be_revoked(
    bus: NatsBus, headrace_keys: BrokerCommand
) -> None:
    await bus.ensure_bucket(KEYS)
    assert (await headrace_keys("create", "--name", "one")).code == 0
    # By hand: our own clients write no such key.
    bus._store.send("$KV.KEYS.lost\x1b[2J", b'{"stream":"KV_MODELS","seq":1}', None, "")
    await bus.put(KEYS.name, "lost", b'{"stream":"KV_MODELS","seq":1}')
    listed = await headrace_keys("list")
    assert listed.code == 0 and "one" in listed.out and "'lost' is not readable" in listed.err
    assert "\x1b" not in listed.err, "whoever wrote it may have chosen the id, too"
    assert (await headrace_keys("create", "--name", "two")).code == 0
    revoked = await headrace_keys("revoke", "lost", "one", "--json")
    assert revoked.code == 0 and [key["key_id"] for key in json.loads(revoked.out)][1:] == ["lost"]
    assert sorted(entry.key for entry in await bus.entries(KEYS.name))[1:] == ["lost\x1b[2J"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["create"], "--name"),
        (["create", "--name", "a b"], "--name"),
        (["create", "--name", "a", "--priority", "top"], "--priority"),
        (["create", "--name", "a", "--weight", "0"], "--weight"),
        (["create", "--name", "a", "--requests-per-minute", "-1"], "--requests-per-minute"),
        (["create", "--name", "a", "--lane", "slow"], "--lane"),
        (["revoke"], "KEY"),
        (["list", "x"], "x"),
        (["destroy"], "destroy"),
    ],
)
async def test_what_is_wrong_is_named(arguments: list[str], named: str, headrace_keys: BrokerCommand) -> None:
    ran = await headrace_keys(*arguments)
    assert ran.code == 2 and named in ran.err
