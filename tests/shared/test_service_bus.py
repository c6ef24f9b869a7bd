import asyncio

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.common_settings import CommonSettings
from headrace_shared.errors import ConfigError
from headrace_shared.service import Service
from headrace_shared.service_bus import service_bus


@pytest.mark.nats
async def test_addresses_may_be_written_with_spaces_and_the_connection_ends_with_the_block(
    nats_server: NatsServer,
) -> None:
    settings = CommonSettings(nats_url=f" {nats_server.url} , {nats_server.url} ")
    async with service_bus(Service("router", "router-1"), settings) as bus:
        assert bus.is_connected
    assert not bus.is_connected


async def test_who_is_to_end_waits_for_no_broker() -> None:
    settings = CommonSettings(nats_url="nats://127.0.0.1:1")
    service = Service("router", "router-1")

    async def body(service: Service) -> None:
        async with service_bus(service, settings):
            pass

    run = asyncio.create_task(service.run(body, drain_timeout_s=3600))
    await asyncio.sleep(0.1)
    service.drain()
    assert await asyncio.wait_for(run, 20) == 0


@pytest.mark.parametrize("url", ["", "nats://", "nats://127.0.0.1:99999", "nats://::1:4222", "nats://[::1:4222", "a b"])
async def test_what_is_no_address_is_told_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="nats_url"):
        async with service_bus(Service("router", "router-1"), CommonSettings(nats_url=f"nats://127.0.0.1:1,{url}")):
            pass


@pytest.mark.nats
async def test_an_address_needs_no_scheme(nats_server: NatsServer) -> None:
    url = nats_server.url.removeprefix("nats://")
    async with service_bus(Service("router", "router-1"), CommonSettings(nats_url=url)) as bus:
        assert bus.is_connected
