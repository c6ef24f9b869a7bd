"""What `headrace drain`, `park` and `promote` share: they tell a worker what to become, and print what it says."""

import asyncio
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence

from headrace_cli.broker_access import BrokerSettings, broker
from headrace_cli.errors import CommandError
from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.errors import ConfigError, ProtocolError
from headrace_shared.fleet_messages import CommandKind, CommandReply, WorkerCommand
from headrace_shared.messages import WorkerId
from headrace_shared.settings import load_settings
from headrace_shared.subjects import commands_subject, replies_subject

ANSWER_S = 6.0
"""A worker answers at once, or when it has heard from its scheduler, for which it waits three seconds."""
WHAT = {
    CommandKind.DRAIN: "Empties a worker and ends it, without losing a token.",
    CommandKind.PARK: "Empties a worker and keeps it loaded, in reserve.",
    CommandKind.PROMOTE: "Makes a parked or draining worker ready again.",
}
_WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def run(kind: CommandKind, argv: Sequence[str]) -> int:
    """Raises ConfigError, CommandError."""
    names = [word for word in argv[:1] if not word.startswith("-")]
    settings = load_settings(
        BrokerSettings,
        argv[len(names) :],
        os.environ,
        prog=f"headrace {kind} WORKER",
        description=f"{WHAT[kind]} WORKER is an id such as worker-0123abcd; `headrace ps` lists them.",
    )
    if not names:
        raise ConfigError("WORKER", "which worker? `headrace ps` lists them")
    if not _WORKER_ID.fullmatch(names[0]):
        raise ConfigError(names[0], "no worker's id")
    sys.stdout.write(asyncio.run(_command(settings, kind, WorkerId(names[0]))))
    return 0


async def _command(settings: BrokerSettings, kind: CommandKind, worker: WorkerId) -> str:
    """What is to be printed. Raises CommandError."""
    me, command_id = f"command-{secrets.token_hex(4)}", secrets.token_hex(8)
    answer: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()

    def on_reply(message: Message) -> None:
        try:
            reply = codec.decode(message.data, CommandReply)
        except ProtocolError:
            return  # of a newer version: then no answer is told of
        if reply.command_id == command_id and not answer.done():
            answer.set_result(reply)

    command = WorkerCommand(worker=worker, kind=kind, command_id=command_id, sender=me, sent_at=time.time())
    async with broker(settings) as bus:
        await bus.subscribe(replies_subject(me), on_reply)
        bus.publish(commands_subject(worker), codec.encode(command))
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await answer
        except TimeoutError as error:
            raise CommandError(f"{worker} does not answer", "is it running? `headrace ps` tells") from error
    if not reply.is_accepted:
        raise CommandError(f"{worker} does not {kind}", reply.message)
    return f"{worker}: {reply.message}\n"
