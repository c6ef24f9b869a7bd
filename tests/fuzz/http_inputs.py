"""Nearly valid calls to a router: its routes, bodies, ids, queries and headers; and bytes that are nearly HTTP."""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.fuzz.bodies import CHATS, FORM, TEXTS
from tests.fuzz.fuzzing import MAX_INPUT_BYTES
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.router.raw_http import CHUNKED, GET, MALFORMED, POST

JSON = "application/json"
TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
OTHERS: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "prompt": "a", "add_special_tokens": True},
    {"model": "tiny", "tokens": [1, 2, 3]},
    {"model": "tiny", "input": "a", "instructions": "b", "max_output_tokens": 3, "stream": True, "store": False},
    {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "temperature": 1},
    {"model": "tiny", "input": "a", "background": True, "max_output_tokens": 3},
    {"model": "tiny", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4},
    {
        "model": "tiny",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
    },
    {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    {"lora_name": "x", "lora_path": "../../etc"},
)
"""Of other endpoints, where they are there; elsewhere they are merely odd."""
BODIES = [{**body, "n": 1} if "n" in body else body for body in (*CHATS, *TEXTS, *OTHERS)]
SEEDS: Sequence[bytes] = [json.dumps(body).encode() for body in BODIES]
MARKS = {
    "chat": (b'"messages"',),
    "completions": (b'"prompt"',),
    "tokenize": (b'"prompt"', b'"messages"'),
    "detokenize": (b'"tokens"',),
    "responses": (b'"input"',),
    "messages": (b'"max_tokens": 3, "system"',),
    "embeddings": (b'"encoding_format"',),
    "batches": (b'"input_file_id"',),
}
"""What a body holds that fits the part of a path."""
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}'
UPLOADS: Sequence[bytes] = (FORM, FORM.replace(b'{"a": 1}\r\n\r\n--xy', LINE))
UPLOAD = "multipart/form-data; boundary=xyz"
TYPES = (*[JSON] * 8, "multipart/form-data; boundary=x", "text/plain", "", "application/json; charset=utf-16")
IDS = ("", "0" * 32, "resp_" + "0" * 32, "batch_1", "file-1", "*", ">", "a.b", "../..", "%00", "é", "x" * 300, "tiny")
VALUES = ("", "0", "1", "-1", "true", "false", "1e999", "nan", "9" * 30, "*", "a.b >", "x" * 300, "é")
HEADERS = (
    "Idempotency-Key",
    "Headrace-Timeout",
    "Headrace-Lane",
    "Headrace-Resumable",
    "Headrace-Overflow",
    "Headrace-Queue-Events",
    "Last-Event-ID",
    "X-Request-Id",
    "traceparent",
    "Authorization",
    "Origin",
    "Content-Encoding",
    "User-Agent",
)
FITTING = {
    "Headrace-Lane": "batch",
    "Headrace-Resumable": "true",
    "Headrace-Timeout": "2",
    "Last-Event-ID": "3",
    "traceparent": f"00-{'1' * 32}-{'2' * 16}-01",
    "User-Agent": "curl/8",
}
RAW: Sequence[bytes] = (
    GET + b"Connection: close\r\n\r\n",
    POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(SEEDS[-1]) + SEEDS[-1],
    CHUNKED + b"Connection: close\r\n\r\n2\r\n{}\r\n0\r\nX: y\r\n\r\n",
    GET + b"\r\n" + POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}" + GET + b"Connection: close\r\n\r\n",
    b"HEAD /v1/models/a%2fb?x=%00 HTTP/1.0\r\n\r\n",
)


class Operation(NamedTuple):
    """As the OpenAPI description has it."""

    method: str
    path: str
    queries: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"http: {self.method.upper()} {self.path}"


class Sent(NamedTuple):
    method: str
    url: str
    headers: Mapping[bytes, bytes]
    data: bytes

    def as_bytes(self) -> bytes:
        """For a file."""
        return f"{self.method} {self.url} {dict(self.headers)}\n".encode() + self.data


def operations(description: Mapping[str, Any]) -> list[Operation]:
    return [
        Operation(
            method,
            path,
            tuple(each["name"] for each in described.get("parameters", ()) if each["in"] == "query"),
        )
        for path, methods in sorted(description["paths"].items())
        for method, described in sorted(methods.items())
    ]


def any_call(random: Random, operation: Operation, ids: Sequence[str]) -> Sent:
    """`ids`: that are in use."""
    path = operation.path
    while "{" in path:
        before, _, rest = path.partition("{")
        name, _, rest = rest.partition("}")
        fitting = [known for known in ids if known.startswith(name[:4])] or ids
        chosen = random.choice(fitting) if fitting and random.random() < 0.6 else random.choice(IDS)
        path = before + quote(chosen, safe="") + rest
    queries = [name for name in operation.queries if random.random() < 0.4]
    query = "&".join(f"{name}={quote(_value(random, ids), safe='')}" for name in queries)
    headers: dict[bytes, bytes] = {}
    while random.random() < 0.2:
        name = random.choice(HEADERS)
        value = FITTING[name] if name in FITTING and random.random() < 0.5 else random.choice(VALUES)
        headers[name.encode()] = value.encode()
    data, kind = _body(random, operation, ids) if operation.method == "post" else (b"", "")
    if kind:
        headers[b"Content-Type"] = kind.encode()
    return Sent(operation.method.upper(), path + (f"?{query}" if query else ""), headers, data)


def any_bytes(random: Random) -> bytes:
    data = random.choice(RAW)
    for _ in range(random.choice((0, 1, 1, 2))):
        lines = data.split(b"\r\n")
        other = random.choice([*RAW, *MALFORMED.values()]).split(b"\r\n")
        match random.randrange(4):
            case 0:
                lines.insert(random.randrange(len(lines) + 1), random.choice(other))
            case 1:
                del lines[random.randrange(len(lines))]
            case 2:
                lines = lines[: random.randrange(len(lines) + 1)] + other
            case _:
                lines = [mutate_bytes(random, data)]
        data = b"\r\n".join(lines)[:MAX_INPUT_BYTES]
    return data


def _value(random: Random, ids: Sequence[str]) -> str:
    if ids and random.random() < 0.2:
        return random.choice(ids)
    return random.choice(VALUES)


def _body(random: Random, operation: Operation, ids: Sequence[str]) -> tuple[bytes, str]:
    """With its content type."""
    if operation.path == "/v1/files" and random.random() < 0.8:
        upload = random.choice(UPLOADS)
        return (upload if random.random() < 0.3 else mutate_bytes(random, upload)), UPLOAD
    marks = next((MARKS[part] for part in operation.path.split("/") if part in MARKS), ())
    fitting = [seed for seed in SEEDS if any(mark in seed for mark in marks)] or SEEDS
    data = random.choice(fitting if random.random() < 0.8 else SEEDS)
    if ids and random.random() < 0.5:
        data = data.replace(b'"file-1"', json.dumps(random.choice(ids)).encode())
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        data = random.choice((mutate_json, mutate_json, mutate_bytes))(random, data)[:MAX_INPUT_BYTES]
    return data, random.choice(TYPES)
