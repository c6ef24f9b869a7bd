"""`headrace dead list|show|requeue|drop`: the requests that were given up because workers died of them."""

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from headrace_cli.action import read_action
from headrace_cli.broker_access import BrokerSettings, broker
from headrace_cli.errors import CommandError
from headrace_shared import codec
from headrace_shared.bus import Bus
from headrace_shared.errors import BusRefused, ConfigError, ProtocolError
from headrace_shared.messages import Audience, Lane, RequestId
from headrace_shared.record_messages import DeadRequest
from headrace_shared.settings import load_settings
from headrace_shared.subjects import ALL_DEAD, DEAD, Queue, dead_subject_of

ACTIONS = {"list": False, "show": True, "requeue": True, "drop": True}
"""Whether each is about certain requests."""
DESCRIPTION = (
    "Lists or shows the requests that were given up because workers died of them, lets some run again as batch work to "
    "see whether they still do harm, or drops them. ID is a request's id, or `all`."
)
MAX_LISTED = 10_000
ALL = "all"


class DeadSettings(BrokerSettings, frozen=True, kw_only=True):
    json: bool = False
    """Print JSON."""


class Entry(NamedTuple):
    dead: DeadRequest
    stream_sequence: int


def run(argv: Sequence[str]) -> int:
    action, names, flags = read_action(argv)
    usages = {name: f"{name} ID…" if is_about_some else name for name, is_about_some in ACTIONS.items()}
    prog = f"headrace dead {usages.get(action, '|'.join(usages.values()))}"
    settings = load_settings(DeadSettings, flags, os.environ, prog=prog, description=DESCRIPTION)
    if action not in ACTIONS:
        raise ConfigError(action or "ACTION", f"one of {', '.join(ACTIONS)}")
    if ACTIONS[action] != bool(names):
        raise ConfigError(names[0] if names else "ID", "unexpected argument" if names else "which requests, or `all`?")
    sys.stdout.write(asyncio.run(_carry_out(settings, action, names)))
    return 0


async def _carry_out(settings: DeadSettings, action: str, names: Sequence[str]) -> str:
    """What is to be printed. Raises CommandError."""
    async with broker(settings) as bus:
        entries = await _find(bus, names)
        if action == "list":
            return _json(entries) if settings.json else _table(entries)
        if action == "show":
            return _json(entries) if settings.json else "\n".join(_details(entry.dead) for entry in entries)
        if action == "drop":
            for entry in entries:
                await bus.delete(DEAD.name, entry.stream_sequence)
            return f"{len(entries)} dropped.\n"
        return "".join([await _requeue(bus, entry) for entry in entries])


async def _find(bus: Bus, names: Sequence[str]) -> list[Entry]:
    """All without names; else those with these ids, in their order."""
    if not names or list(names) == [ALL]:
        return await _read(bus, ALL_DEAD)
    entries = []
    for name in names:
        if not name.isalnum():
            raise ConfigError(name, "no request id")
        found = await _read(bus, dead_subject_of(name))
        if not found:
            raise CommandError(f"no dead request {name}", "`headrace dead list` names them")
        entries += found
    return entries


async def _read(bus: Bus, subject: str) -> list[Entry]:
    try:
        await bus.num_messages(DEAD.name)
    except BusRefused:
        # No scheduler has made the stream yet. It is not ours to make: we do not know how many copies it is to have.
        return []
    entries = []
    for message in await bus.read(DEAD.name, subject, MAX_LISTED):
        try:
            entries.append(Entry(codec.decode(message.data, DeadRequest), message.stream_sequence))
        except ProtocolError as error:
            raise CommandError(f"message {message.stream_sequence} of {DEAD.name} is not readable: {error}") from error
    return entries


async def _requeue(bus: Bus, entry: Entry) -> str:
    """Under a new id: the old one has had its end. It runs in the background, as a batch request, to show whether it
    is harmful still: its answer goes to the token log, and to no client. The new id follows from the entry, so that the
    queue stores the request once if we fail before the entry is deleted and are soon asked again."""
    dead = entry.dead
    if dead.request is None:
        raise CommandError(
            f"the prompt of {dead.request_id} was not kept", "start schedulers with --dead-prompts to keep prompts"
        )
    origin = f"{dead.request_id} {entry.stream_sequence}"
    new_id = RequestId(hashlib.sha256(origin.encode()).hexdigest()[:32])
    request = replace(dead.request, request_id=new_id, lane=Lane.BATCH)
    request = replace(request, audience=Audience.NONE, timeout_s=0.0)
    subject = Queue(request.model, Lane.BATCH).subject
    await bus.enqueue(subject, codec.encode(request), message_id=request.request_id)
    await bus.delete(DEAD.name, entry.stream_sequence)
    return f"{dead.request_id} goes on as {request.request_id}; its answer is told to nobody.\n"


def _json(entries: Sequence[Entry]) -> str:
    shown = [msgspec.to_builtins(replace(entry.dead, request=None)) for entry in entries]
    for fields, entry in zip(shown, entries, strict=True):
        del fields["request"]
        fields["has_prompt"] = entry.dead.request is not None
    return msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n"


def _table(entries: Sequence[Entry]) -> str:
    if not entries:
        return "No request was given up.\n"
    rows = [("REQUEST", "DIED", "MODEL", "PROMPT", "ANSWER", "REASON")]
    for dead, _ in entries:
        rows.append(
            (
                dead.request_id,
                _time(dead),
                dead.model,
                str(dead.num_prompt_tokens),
                str(dead.num_output_tokens),
                dead.reason,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _details(dead: DeadRequest) -> str:
    lines = [
        f"request   {dead.request_id}",
        f"died      {_time(dead)}",
        f"reason    {dead.reason}",
        *(f"lost      {reason}" for reason in dead.losses),
        f"model     {dead.model}",
        f"tenant    {dead.tenant or '-'}",
        f"lane      {dead.lane}",
        f"router    {dead.router}",
        f"prompt    {dead.num_prompt_tokens} tokens, {'kept' if dead.request is not None else 'not kept'}",
        f"answer    {dead.num_output_tokens} of at most {dead.max_tokens} tokens, {dead.num_choices} choices",
    ]
    return "\n".join(lines) + "\n"


def _time(dead: DeadRequest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(dead.died_at))
