"""Commands of the operator, run against a broker."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from headrace_cli.commands import run


class Ran(NamedTuple):
    code: int
    out: str
    err: str


BrokerCommand = Callable[..., Awaitable[Ran]]


def broker_command(name: str, nats_url: str, capsys: pytest.CaptureFixture[str]) -> BrokerCommand:
    async def ran(*arguments: str) -> Ran:
        code = await asyncio.to_thread(run, [name, *arguments, "--nats-url", nats_url])
        return Ran(code, *capsys.readouterr())

    return ran
