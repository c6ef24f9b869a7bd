"""Key-value buckets: a stream each, one message a key, compare-and-set by the key's last sequence."""

from collections.abc import Mapping

from headrace_shared.bus import Entry, Message
from headrace_shared.errors import RevisionConflict
from headrace_shared.nats_jetstream import JetStream
from headrace_shared.subjects import (
    DEDUPE_WINDOW_S,
    BucketSpec,
    bucket_key,
    bucket_stream,
    bucket_subject,
    stored_subject,
)

REMOVED_KEPT_S = 3600
"""How long the marker of a removed key stays, for watchers that were away."""
EXPIRED_KEPT_S = 60


class KeyValue:
    def __init__(self, streams: JetStream) -> None:
        self._streams = streams

    async def ensure_bucket(self, spec: BucketSpec) -> None:
        config = {
            "name": bucket_stream(spec.name),
            "subjects": [bucket_subject(spec.name, ">")],
            "retention": "limits",
            "discard": "new",
            "storage": "memory" if spec.in_memory else "file",
            "max_bytes": spec.max_bytes,
            "max_msgs_per_subject": 1,
            "max_age": round((spec.ttl_s or 0.0) * 1e9),
            "duplicate_window": round(min(DEDUPE_WINDOW_S, spec.ttl_s or DEDUPE_WINDOW_S) * 1e9),
            # Else the writer of one key could empty the bucket. The markers of what has expired need both.
            "allow_rollup_hdrs": bool(spec.ttl_s),
            "deny_purge": not spec.ttl_s,
            "deny_delete": True,
            "allow_direct": True,
            "allow_msg_ttl": True,
            # For watches, which thus need no consumer.
            "republish": {"src": bucket_subject(spec.name, ">"), "dest": stored_subject(spec.name, ">")},
        }
        if spec.ttl_s:
            config["subject_delete_marker_ttl"] = EXPIRED_KEPT_S * 10**9
        await self._streams.ensure_stream_config(config)

    async def get(self, bucket: str, key: str) -> Entry | None:
        message = await self._streams.last(bucket_stream(bucket), bucket_subject(bucket, key))
        return None if message is None or is_removal(message.headers) else entry_of(bucket, message)

    async def create(self, bucket: str, key: str, value: bytes) -> int:
        try:
            return await self.update(bucket, key, value, 0)
        except RevisionConflict:
            # The last message may be the marker of a removed key.
            message = await self._streams.last(bucket_stream(bucket), bucket_subject(bucket, key))
            if message is None or not is_removal(message.headers):
                raise
            return await self.update(bucket, key, value, message.stream_sequence)

    async def update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        return await self._streams.publish(bucket_subject(bucket, key), value, headers)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        return await self._streams.publish(bucket_subject(bucket, key), value, {})

    async def remove(self, bucket: str, key: str, revision: int | None) -> None:
        if await self.get(bucket, key) is None:
            return
        headers = {"KV-Operation": "DEL", "Nats-TTL": f"{REMOVED_KEPT_S}s"}
        if revision is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        await self._streams.publish(bucket_subject(bucket, key), b"", headers)

    async def entries(self, bucket: str, under: str) -> list[Entry]:
        keys = f"{under}.>" if under else ">"
        messages = await self._streams.newest(bucket_stream(bucket), bucket_subject(bucket, keys))
        return [entry_of(bucket, message) for message in messages if not is_removal(message.headers)]


def is_removal(headers: Mapping[str, str]) -> bool:
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers


def entry_of(bucket: str, message: Message) -> Entry:
    return Entry(bucket_key(bucket, message.subject), message.data, message.stream_sequence)
