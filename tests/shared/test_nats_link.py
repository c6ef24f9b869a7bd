"""Which broker of a cluster is tried next."""

from itertools import pairwise
from typing import Any

import pytest

from headrace_shared.broker_identity import BrokerIdentity
from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_link import LinkOptions, NatsLink


class Nobody:
    async def link_up(self) -> None:
        return

    async def link_down(self) -> None:
        return

    def link_restored(self) -> None:
        return

    def link_closed(self) -> None:
        return


@pytest.mark.parametrize("num_servers", [1, 2, 3])
async def test_a_broker_that_does_not_answer_is_not_tried_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch, num_servers: int
) -> None:
    """As long as there are others."""
    tried: list[str] = []

    async def refuse(_: NatsLink, client: Any, server: str) -> None:
        tried.append(server)
        raise OSError("nobody is there")

    monkeypatch.setattr(NatsLink, "_attempt", refuse)
    monkeypatch.setattr("headrace_shared.nats_link.MIN_RETRY_S", 0.001)
    monkeypatch.setattr("headrace_shared.nats_link.MAX_RETRY_S", 0.001)
    servers = tuple(f"nats://broker-{number}:4222" for number in range(num_servers))
    link = NatsLink(LinkOptions(servers, "test", BrokerIdentity(None, "", "", "", ""), 2.0), Nobody())
    with pytest.raises(BusUnavailable):
        await link.open(0.2)
    await link.close()
    assert set(tried) == set(servers) and len(tried) > 3
    if num_servers > 1:
        assert all(before != after for before, after in pairwise(tried))
