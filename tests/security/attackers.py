"""Whoever is not trusted with everything, and all the ways to have the broker send something somewhere."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from headrace_shared import subjects
from headrace_shared.broker_permissions import Role
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import ACCOUNTS, LEASES, MODELS, bucket_stream, bucket_subject
from tests.security.conftest import PATIENT_S, As

FORGED = b"forged"
_FOR_ALL: Mapping[str, object] = {
    "deliver_policy": "all",
    "ack_policy": "none",
    "replay_policy": "instant",
    "max_deliver": 1,
}
_HEADERS: tuple[Mapping[str, str], ...] = (
    {},
    {"Nats-Expected-Stream": "OTHER"},
    {"Nats-Expected-Last-Subject-Sequence": "99"},
    {"Nats-Required-Api-Level": "99"},
    {"Nats-Rollup": "all"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"},
    {"Nats-TTL": "never", "Nats-Msg-Id": "1"},
    {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "requests.m.batch.0"},
    {"Nats-Incr": "1"},
)
"""With which the broker answers a publication in its different ways: with errors, or before a batch is whole."""


class Attacker(NamedTuple):
    role: Role
    bus: NatsBus
    stream: str
    subject: str
    """Where it may write what it may read."""

    async def ask(self, call: str, body: object, answer_to: str, headers: Mapping[str, str] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.bus._store.send(f"$JS.API.{call}", data, headers, answer_to)

    async def have_it_said(self, where: str) -> None:
        """Tries everything that could make the broker send something to that subject."""
        for headers in _HEADERS:
            for data in (FORGED, b""):
                self.bus._store.send(self.subject, data, {**headers, "Nats-Trace-Dest": where}, where)
                self.bus._store.send(self.subject, data, headers, where)
        self.bus._store.send(self.subject, FORGED, None, where)
        stream, subject = self.stream, self.subject
        for which in (
            {"last_by_subj": subject},
            {"seq": 1, "next_by_subj": subject},
            {"seq": 1, "next_by_subj": subject, "batch": 2},
            {"multi_last": [subject]},
            {"last_by_subj": subject + ".none"},
            {"seq": 999_999},
            {"what": "not"},
            None,
        ):
            for ask in [which] if which is None else [which, {**which, "no_hdr": True}]:
                for call in ("DIRECT.GET", "STREAM.MSG.GET"):
                    await self.ask(f"{call}.{stream}", ask, where)
                    await self.ask(f"{call}.{stream}", ask, where, {"Nats-Required-Api-Level": "99"})
        await self.ask(f"DIRECT.GET.{stream}.{subject}", None, where)
        for call in ("STREAM.INFO", "STREAM.PURGE", "CONSUMER.LIST", "CONSUMER.NAMES", "STREAM.SNAPSHOT"):
            for body in (None, {}, {"what": "not"}):
                await self.ask(f"{call}.{stream}", body, where)
                await self.ask(f"{call}.REQUESTS", body, where)
        for number, extra in enumerate(
            ({}, {"idle_heartbeat": 10**8}, {"idle_heartbeat": 10**8, "flow_control": True})
        ):
            name = f"{self.role}-{number}"
            config: dict[str, object] = {"name": name, "deliver_subject": where, **_FOR_ALL, **extra}
            make = {"stream_name": stream, "config": config, "action": "create"}
            await self.ask(f"CONSUMER.CREATE.{stream}.{name}", make, where)
            pull = {"name": name, "ack_policy": "none"}
            await self.ask(f"CONSUMER.CREATE.{stream}.{name}p", {**make, "config": pull}, where)
            await self.ask(f"CONSUMER.MSG.NEXT.{stream}.{name}p", {"batch": 1, "no_wait": True}, where)
            await self.ask(f"CONSUMER.DELETE.{stream}.{name}", None, where)
        for call in ("CONSUMER.INFO", "CONSUMER.DELETE", "CONSUMER.MSG.NEXT", "CONSUMER.RESET", "CONSUMER.PAUSE"):
            await self.ask(f"{call}.REQUESTS.m-interactive-0", None, where)
        await self.bus._store.echo()


async def attackers(bus_of: As) -> list[Attacker]:
    own = (
        (Role.WORKER, MODELS, "m.0"),
        (Role.AUTOSCALER, LEASES, subjects.AUTOSCALER_LEASE),
        (Role.ROUTER, ACCOUNTS, "k"),
    )
    made = []
    for role, bucket, key in own:
        bus = await bus_of(role, PATIENT_S)
        await bus.put(bucket.name, key, FORGED)
        made.append(Attacker(role, bus, bucket_stream(bucket.name), bucket_subject(bucket.name, key)))
    # What routers read as it comes: their own words, and of many messages.
    made.append(made[-1]._replace(stream="TOKENS", subject="tokens.router-1.0123456789abcdef0123456789abcdef"))
    return made
