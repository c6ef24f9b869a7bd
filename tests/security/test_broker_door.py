"""Who gets into the broker at all, and over which wire."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_cli.init_command import InitSettings, make_secrets
from headrace_shared.broker import NatsServer
from headrace_shared.broker_credentials import ensure_keys, key_path
from headrace_shared.broker_identity import Signer
from headrace_shared.broker_permissions import Role
from headrace_shared.errors import BusUnavailable, ConfigError
from headrace_shared.nats_bus import NatsBus
from headrace_shared.nkeys import new_seed
from headrace_shared.subjects import KEYS
from tests.integration.deployment import until
from tests.security.raw_client import guarded_server, raw_client

pytestmark = pytest.mark.nats


async def connected(server: NatsServer, keys: Path, role: Role, authority: str = "", timeout_s: float = 5.0) -> NatsBus:
    return await NatsBus.connect(
        server.url,
        name="test",
        on_closed=lambda: None,
        role=role,
        credentials=str(key_path(keys, role)),
        authority=authority,
        connect_timeout_s=timeout_s,
    )


async def test_nobody_enters_without_a_key_of_the_brokers(guarded: NatsServer, tmp_path: Path) -> None:
    own = key_path(tmp_path / "keys", Role.WORKER).read_text()
    for attempt in ("nothing", "password", "token", "stranger", "no signature", "another nonce", "public key alone"):
        async with raw_client(guarded) as (client, info):
            assert info["auth_required"] and "nonce" in info
            nonce, key = info["nonce"], Signer(own)
            stranger = Signer(new_seed())
            options = {
                "nothing": {},
                "password": {"user": "worker", "pass": own.strip()},
                "token": {"auth_token": own.strip()},
                "stranger": {"nkey": stranger.public_key, "sig": stranger(nonce).decode()},
                "no signature": {"nkey": key.public_key},
                "another nonce": {"nkey": key.public_key, "sig": key("0" * len(nonce)).decode()},
                "public key alone": {"user": key.public_key, "pass": ""},
            }[attempt]
            lines = await client.greet(options)
            assert lines and "Authorization Violation" in lines[-1], (attempt, lines)


async def test_a_key_of_another_deployment_is_refused_and_said_to_be(guarded: NatsServer, tmp_path: Path) -> None:
    ensure_keys(tmp_path / "others")
    with pytest.raises(BusUnavailable, match="refuses our credentials"):
        await connected(guarded, tmp_path / "others", Role.ROUTER)
    with pytest.raises(BusUnavailable, match="refuses our credentials"):
        await NatsBus.connect(guarded.url, name="anonymous", on_closed=lambda: None)


async def test_a_file_that_is_no_key_is_a_configuration_error_that_does_not_show_it(
    guarded: NatsServer, tmp_path: Path
) -> None:
    path = key_path(tmp_path / "keys", Role.ROUTER)
    path.write_text("SUAsecretCANARY")
    with pytest.raises(ConfigError, match="no seed of an nkey") as caught:
        await connected(guarded, tmp_path / "keys", Role.ROUTER)
    assert "CANARY" not in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        await connected(guarded, tmp_path / "keys", Role.ROUTER)


async def test_rotated_keys_lock_out_the_old_ones(tmp_path: Path) -> None:
    before = ensure_keys(tmp_path / "keys")
    old = key_path(tmp_path / "keys", Role.ROUTER).read_text()
    assert ensure_keys(tmp_path / "keys") == before, "they are kept"
    assert ensure_keys(tmp_path / "keys", rotate=True).keys() == before.keys()
    server = guarded_server(tmp_path)
    await server.start()
    bus = await connected(server, tmp_path / "keys", Role.ROUTER)
    await bus.close()
    key_path(tmp_path / "keys", Role.ROUTER).write_text(old)
    with pytest.raises(BusUnavailable, match="refuses"):
        await connected(server, tmp_path / "keys", Role.ROUTER)
    await server.stop()


@pytest.fixture
async def encrypted(tmp_path: Path) -> AsyncIterator[NatsServer]:
    folder = tmp_path / "secrets"
    make_secrets(folder, InitSettings(tls=True, broker_dir=str(folder / "broker"), hosts=("127.0.0.1",)))
    access = (folder / "broker/access.conf").read_text()
    server = NatsServer(tmp_path / "nats", sync_interval="100ms", access=access)
    await server.start()
    yield server
    await server.stop()


async def test_everything_works_encrypted_and_reconnects(encrypted: NatsServer, tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    authority = str(folder / "router/ca.pem")
    scheduler = await connected(encrypted, folder, Role.SCHEDULER, authority)
    await scheduler.ensure_bucket(KEYS)
    await encrypted.kill()
    await encrypted.start()
    await until(lambda: scheduler.is_connected)
    assert await scheduler.num_messages("KV_KEYS") == 0
    await scheduler.close()


async def test_plain_text_gets_no_answer(encrypted: NatsServer, tmp_path: Path) -> None:
    """Not even the greeting, which names versions and would tell a client to go on in the clear."""
    with pytest.raises(BusUnavailable, match="no broker"):
        await connected(encrypted, tmp_path / "secrets", Role.ROUTER, timeout_s=0.1)
    reader, writer = await asyncio.open_connection(encrypted.host, encrypted.port)
    writer.write(b'CONNECT {"verbose": true}\r\nPING\r\n')
    async with asyncio.timeout(20):
        said = await reader.read()
    assert b"INFO" not in said and b"PONG" not in said and b"OK" not in said
    writer.close()


async def test_a_broker_that_others_vouch_for_is_not_ours(encrypted: NatsServer, tmp_path: Path) -> None:
    make_secrets(tmp_path / "others", InitSettings(tls=True))
    for authority in (str(tmp_path / "others/router/ca.pem"), ""):
        with pytest.raises(BusUnavailable, match="no broker"):
            await connected(encrypted, tmp_path / "secrets", Role.ROUTER, authority, timeout_s=0.1)
    old = ssl.create_default_context(cafile=str(tmp_path / "secrets/router/ca.pem"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(encrypted.host, encrypted.port, ssl=old)


async def test_a_plain_broker_is_not_talked_to_where_encryption_is_wanted(guarded: NatsServer, tmp_path: Path) -> None:
    make_secrets(tmp_path / "secrets", InitSettings(tls=True))
    with pytest.raises(BusUnavailable, match="no broker"):
        await connected(guarded, tmp_path / "keys", Role.ROUTER, str(tmp_path / "secrets/router/ca.pem"), timeout_s=0.1)
