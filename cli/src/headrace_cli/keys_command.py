"""`headrace keys create|list|revoke`: who may use the API, and how much of it."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace_cli.action import read_action
from headrace_cli.broker_access import BrokerSettings, broker
from headrace_cli.errors import CommandError
from headrace_shared import codec
from headrace_shared.api_keys import ApiKey, Priority, choose_flow, new_key
from headrace_shared.bus import Bus
from headrace_shared.errors import BusRefused, ConfigError, ProtocolError
from headrace_shared.messages import Lane
from headrace_shared.settings import load_settings
from headrace_shared.subjects import KEYS, bucket_stream

Name = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{0,64}$")]
Limit = Annotated[int, Meta(ge=0, le=10**12)]


class KeysSettings(BrokerSettings, frozen=True, kw_only=True):
    json: bool = False
    """Print JSON."""


class CreateSettings(KeysSettings, frozen=True, kw_only=True):
    name: Name = ""
    """What the key is called in lists."""
    tenant: Name = ""
    """Whose key it is: its keys share requests, cached prompts and a share of the workers; empty: the key's name."""
    requests_per_minute: Limit = 0
    """Most requests a minute; 0: no limit. Each answer to each prompt counts, and each input of embeddings."""
    tokens_per_minute: Limit = 0
    """Most tokens a minute, prompts and answers together; 0: no limit."""
    max_concurrent: Limit = 0
    """Most requests at once, counted so; 0: no limit."""
    tokens_per_day: Limit = 0
    """Most tokens a day (UTC); 0: no limit."""
    models: tuple[str, ...] = ()
    """Models that may be asked, separated by commas; empty: all."""
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    """Share of the workers, relative to other tenants'."""
    priority: Literal["low", "normal", "high"] = "normal"
    """Class: low, normal or high. A higher one goes first, and takes places from lower ones."""
    lane: Literal["interactive", "batch"] = "interactive"
    """interactive, or batch: only what others leave."""
    overflow: bool = False
    """A smaller model may answer when the one asked for is overloaded."""
    admin: bool = False
    """It may load and unload LoRA adapters."""


USAGES = {"create": "create", "list": "list", "revoke": "revoke KEY…"}
DESCRIPTION = (
    "Makes an API key, lists all, or revokes some. What a key may do is set when it is made: `headrace keys create "
    "--help`."
)
DESCRIPTIONS = {
    "create": "Makes an API key, and prints it this once: only its digest is kept. What it may do is fixed with it.",
    "list": "Lists all API keys that are not revoked, and what each may do.",
    "revoke": "Revokes API keys, each named by its id or its name: no router takes them any more.",
}


def run(argv: Sequence[str]) -> int:
    action, names, flags = read_action(argv)
    prog = f"headrace keys {USAGES.get(action, '|'.join(USAGES.values()))}"
    kind = CreateSettings if action == "create" else KeysSettings
    settings = load_settings(kind, flags, os.environ, prog=prog, description=DESCRIPTIONS.get(action, DESCRIPTION))
    if action not in USAGES:
        raise ConfigError(action or "ACTION", f"one of {', '.join(USAGES)}")
    if bool(names) != (action == "revoke"):
        raise ConfigError(
            names[0] if names else "KEY", "unexpected argument" if names else "which keys, by id or name?"
        )
    if isinstance(settings, CreateSettings):
        text = _create(settings)
    else:
        text = _list(settings) if action == "list" else _revoke(settings, names)
    sys.stdout.write(asyncio.run(text))
    return 0


async def _create(settings: CreateSettings) -> str:
    if not settings.name:
        raise ConfigError("--name", "must be set")
    tenant = settings.tenant or settings.name
    async with broker(settings) as bus:
        keys, _ = await read_keys(bus)
        if any(key.name == settings.name for key in keys):
            raise CommandError(f"there is a key named {settings.name}", "revoke it first, or choose another --name")
        made = new_key()
        record = ApiKey(
            key_id=made.key_id,
            secret_hash=made.secret_hash,
            name=settings.name,
            tenant=tenant,
            flow=choose_flow(tenant, keys),
            created=int(time.time()),
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
            max_concurrent=settings.max_concurrent,
            tokens_per_day=settings.tokens_per_day,
            models=settings.models,
            weight=settings.weight,
            priority=Priority(settings.priority),
            lane=Lane(settings.lane),
            may_overflow=settings.overflow,
            is_admin=settings.admin,
        )
        await bus.create(KEYS.name, record.key_id, codec.encode(record))
    if settings.json:
        return _json({"key": made.text} | _shown(record))
    return f"{made.text}\nThis is the only time that the key is shown. Its id is {record.key_id}.\n"


async def _list(settings: KeysSettings) -> str:
    async with broker(settings) as bus:
        keys, _ = await read_keys(bus)
    if settings.json:
        return _json([_shown(key) for key in keys])
    if not keys:
        return "There are no keys.\n"
    rows: list[tuple[str, ...]] = [
        ("ID", "NAME", "TENANT", "CREATED", "CLASS", "WEIGHT", "REQ/MIN", "TOK/MIN", "AT ONCE", "TOK/DAY", "MODELS")
    ]
    for key in keys:
        created = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        level = "batch" if key.lane is Lane.BATCH else key.priority.value
        limits = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent, key.tokens_per_day)
        words = [str(limit) if limit else "-" for limit in limits]
        models = ",".join(key.models) or "all"
        rows.append((key.key_id, key.name, key.tenant, created, level, f"{key.weight:g}", *words, models))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


async def _revoke(settings: KeysSettings, names: Sequence[str]) -> str:
    async with broker(settings) as bus:
        keys, unreadable = await read_keys(bus)
        chosen, lost = [], []
        for name in names:
            found = [key for key in keys if name in (key.key_id, key.name)]
            if name in unreadable:
                lost.append(name)
            elif not found:
                raise CommandError(f"no key {name}", "`headrace keys list` names them")
            chosen += found
        for key_id in (*(key.key_id for key in chosen), *lost):
            await bus.remove(KEYS.name, key_id)
    if settings.json:
        return _json([_shown(key) for key in chosen] + [{"key_id": key_id} for key_id in lost])
    told = [f"{key.name} ({key.key_id}) is revoked.\n" for key in chosen]
    return "".join(told + [f"{key_id} is revoked.\n" for key_id in lost])


async def read_keys(bus: Bus) -> tuple[list[ApiKey], list[str]]:
    """All, oldest first, and the ids of those that are not readable: they must not keep anybody from revoking others.
    Raises CommandError if there can be none yet."""
    try:
        await bus.num_messages(bucket_stream(KEYS.name))
    except BusRefused as error:
        # Not ours to make: we do not know how many copies it is to have.
        raise CommandError("the broker has no place for keys yet", "start the services first") from error
    keys, unreadable = [], []
    for entry in await bus.entries(KEYS.name):
        try:
            keys.append(codec.decode(entry.value, ApiKey))
        except ProtocolError as error:
            unreadable.append(entry.key)
            sys.stderr.write(f"The key {entry.key!r} is not readable, and should be revoked: {error}\n")
    return sorted(keys, key=lambda key: (key.created, key.key_id)), unreadable


def _shown(key: ApiKey) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(key)
    return {name: value for name, value in shown.items() if name not in ("type", "secret_hash", "flow")}


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
