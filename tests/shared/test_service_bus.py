import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.common_settings import CommonSettings
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
