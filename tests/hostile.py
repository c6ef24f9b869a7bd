"""Requests that mean harm, each of a kind that a server of this sort has fallen to. All must be refused with a 4xx."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class Hostile(NamedTuple):
    name: str
    path: str
    body: bytes
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_PARAMETERS: dict[str, Any] = {
    "many choices": {"n": 10**6},
    "no choice": {"n": 0},
    "a negative choice": {"n": -1},
    "a huge answer": {"max_tokens": 2**63},
    "a negative answer": {"max_tokens": -1},
    "more at least than at most": {"min_tokens": 50, "max_tokens": 5},
    "a huge seed": {"seed": 2**64},
    "an infinite temperature": {"temperature": 10**400},
    "a negative temperature": {"temperature": -1.0},
    "a probability of 2": {"top_p": 2},
    "many stop strings": {"stop": ["x"] * 1000},
    "a long stop string": {"stop": "x" * 10**6},
    "a bias beyond the vocabulary": {"logit_bias": {"99999999": 1}},
    "a bias at a negative token": {"logit_bias": {"-1": 1}},
    "many biases": {"logit_bias": {str(i): 1 for i in range(5000)}},
    "a huge bias": {"logit_bias": {"1": 1e308}},
    "a stop token beyond the vocabulary": {"stop_token_ids": [2**31]},
    "a negative stop token": {"stop_token_ids": [-1]},
    "a bad word beyond the vocabulary": {"bad_words": ["x" * 10**6]},
    "a huge penalty": {"repetition_penalty": 1e300},
    "a penalty of zero": {"repetition_penalty": 0},
    "a long user": {"user": "u" * 2**20},
    "large metadata": {"metadata": {"a": "b" * 2**20}},
    "a salt with a NUL": {"cache_salt": "a\0b"},
    "a schema that refers to itself": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}
    },
    "an exploding expression": {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}},
    "a grammar that is none": {"structured_outputs": {"grammar": "start: " + "(" * 30_000}},
    "a template": {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
    "a template's variable": {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
}
_PROMPTS: dict[str, Any] = {
    "no prompt": "",
    "an empty prompt": [""],
    "no prompts": [],
    "an empty list": [[]],
    "a token beyond the vocabulary": [99999999],
    "a negative token": [-1],
    "a huge token": [2**64],
    "a prompt beyond the context": "word " * 100_000,
    "many prompts": ["x"] * 100_000,
    "mixed prompts": ["x", 1],
}
_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half of an object": b'{"model":',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "no UTF-8": b"\xff\xfe\x00",
    "half of a character": b'{"model": "\\ud800"}',
    "a long number": b'{"n": ' + b"9" * 100_000 + b"}",
    "a number that is none": b'{"model": "x", "prompt": "x", "temperature": NaN}',
    "a list": b"[1, 2]",
    "binary": bytes(range(256)) * 16,
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}
_HEADERS: dict[str, dict[str, str]] = {
    "plain text": {"content-type": "text/plain"},
    "a form": {"content-type": "application/x-www-form-urlencoded"},
    "a compressed body": {"content-encoding": "gzip"},
    "a page of another origin": {"origin": "https://evil.example"},
    "a name that was pointed here": {"host": "evil.example"},
    "a key that is none": {"authorization": "Bearer hr-000000000000-" + "A" * 43},
}


def requests(model: str) -> Iterator[Hostile]:
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
    text: dict[str, Any] = {"model": model, "prompt": "Hi"}
    for name, fields in _PARAMETERS.items():
        yield Hostile(name, CHAT, _json(chat | fields))
        if "response_format" not in fields:
            yield Hostile(name, TEXT, _json(text | fields | {"stream": True}))
    for name, prompt in _PROMPTS.items():
        yield Hostile(name, TEXT, _json(text | {"prompt": prompt}))
    for name, body in _BODIES.items():
        yield Hostile(name, CHAT, body)
        yield Hostile(name, TEXT, body)
    for name, headers in _HEADERS.items():
        yield Hostile(name, CHAT, _json(chat), headers)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a" * 100: "b" * 10**4}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 10_000}}
    yield Hostile("many tools", CHAT, _json(chat | {"tools": [tool] * 200}))
    yield Hostile("deep arguments", CHAT, _json(chat | {"messages": [{"role": "assistant", "tool_calls": [call]}]}))
    yield Hostile("a king", CHAT, _json(chat | {"messages": [{"role": "king", "content": "Hi"}]}))
    yield Hostile("another model", CHAT, _json(chat | {"model": "../../etc/passwd"}))
    yield Hostile("a picture", CHAT, _json(chat | {"messages": [_picture("http://169.254.169.254/latest/meta-data")]}))
    yield Hostile("a file", CHAT, _json(chat | {"messages": [_picture("file:///etc/passwd")]}))
    yield Hostile("a body beyond the limit", TEXT, _json(text | {"prompt": "x" * (17 << 20)}))


def _picture(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
