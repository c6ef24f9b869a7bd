"""What clients send: every schema, and what is checked behind it."""

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from headrace_router.batches.lines import BadLine, LineChecker, parse_line
from headrace_router.files.multipart import MultipartParser, PartBegin, PartData
from headrace_router.models import ServedModel
from headrace_router.parsing import parse_body
from headrace_router.requests import chat_message, check_chat_length, encode_chat, encode_prompts
from headrace_router.schemas import ChatBody, CompletionBody
from headrace_router.tokenization import TextEncoder
from headrace_router.validation import validate_chat, validate_completion
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import SamplingParams
from tests.byte_model import make_card
from tests.fuzz.fuzzing import Target
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.router.local_chat import local_encoder, rendered

COMMON: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "stop": ["\n", "END"],
    "seed": 7,
    "logit_bias": {"5": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_queue_events": True},
    "user": "u",
    "metadata": {"a": "b"},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "cache_salt": "s",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/x"}},
    "$defs": {"x": {"type": "string"}},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CHATS: tuple[dict[str, Any], ...] = (
    {
        **COMMON,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "ok", "name": "f"},
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"thinking": True},
    },
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "continue_final_message": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        "max_completion_tokens": 3,
    },
    {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": "required"},
    {"model": "tiny", "messages": [{"role": "developer", "content": "a"}], "stream": True},
)
TEXTS: tuple[dict[str, Any], ...] = (
    {**COMMON, "prompt": "a", "logprobs": 2},
    {"model": "tiny", "prompt": ["a", "b"], "ignore_eos": True, "min_tokens": 2, "max_tokens": 4},
    {"model": "tiny", "prompt": [1, 2, 3], "structured_outputs": {"regex": "[0-9]+"}},
    {"model": "tiny", "prompt": [[1], [2, 3]], "structured_outputs": {"choice": ["a", "b"]}},
    {"model": "tiny", "prompt": "a", "structured_outputs": {"json": SCHEMA}, "overflow": True, "background": True},
)


FORM = b"\r\n".join(
    (
        b"--xyz",
        b'Content-Disposition: form-data; name="purpose"',
        b"",
        b"batch",
        b"--xyz",
        b'Content-Disposition: form-data; name="file"; filename="a \\"b\\".jsonl"',
        b"Content-Type: application/jsonl",
        b"",
        b'{"a": 1}\r\n\r\n--xy',
        b"--xyz--",
        b"",
    )
)


def targets() -> list[Target]:
    return [
        *_uploads(),
        Target("body: a chat", _dumped(CHATS), mutate_json, _chat(), (InvalidRequest,)),
        Target("body: a completion", _dumped(TEXTS), mutate_json, _completion(), (InvalidRequest,)),
    ]


def _uploads() -> list[Target]:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}
    return [
        Target("body: a form", [FORM], mutate_bytes, _form, (InvalidRequest,)),
        Target("body: a batch's line", [json.dumps(line).encode()], mutate_json, _line, (BadLine,)),
    ]


def _form(data: bytes) -> None:
    """Wherever it is cut, the same comes out."""
    random = Random(data)
    whole = _parts([data])
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(9)))
    assert _parts([data[start:end] for start, end in pairwise([0, *cuts, len(data)])]) == whole
    if isinstance(whole, str):
        raise InvalidRequest(whole)


def _parts(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]] | str:
    """Of each part name, file and content; or what is wrong."""
    parser = MultipartParser(b"xyz")
    found: list[tuple[str, str | None, bytes]] = []
    try:
        for piece in pieces:
            for event in parser.feed(piece):
                if isinstance(event, PartBegin):
                    found.append((event.name, event.filename, b""))
                elif isinstance(event, PartData):
                    found[-1] = (*found[-1][:2], found[-1][2] + event.data)
    except InvalidRequest as error:
        return str(error)
    return found if parser.is_complete else "incomplete"


def _line(data: bytes) -> None:
    """However it is cut, as many lines and errors are found."""
    random = Random(data)
    told = []
    for step in (len(data) or 1, random.randrange(1, 5000)):
        checker = LineChecker("/v1/completions", 100, 10)
        for start in range(0, len(data), step):
            checker.feed(data[start : start + step])
        checker.end()
        told.append((checker.num_lines, checker.errors))
    assert told[0] == told[1]
    parse_line(1, data, "/v1/completions")


def _dumped(bodies: tuple[dict[str, Any], ...]) -> list[bytes]:
    return [json.dumps(body).encode() for body in bodies]


def _chat() -> Callable[[bytes], None]:
    card = make_card(context=4096)
    model = ServedModel(card, local_encoder(card))

    def run(data: bytes) -> None:
        chat, params = validate_chat(parse_body(ChatBody, data), card, 1)
        _check(params.sampling)
        check_chat_length(model, chat, params.max_tokens)
        encode_chat(model, chat, rendered(model.encoder, chat_message(model, chat)), params)

    return run


def _completion() -> Callable[[bytes], None]:
    card = make_card(context=4096)
    model = ServedModel(card, TextEncoder(card))

    def run(data: bytes) -> None:
        prompts, params = validate_completion(parse_body(CompletionBody, data), card, 1)
        _check(params.sampling)
        for prompt in encode_prompts(model, prompts, params):
            assert prompt.stop.max_tokens >= 1

    return run


def _check(sampling: SamplingParams) -> None:
    """What gets through is in range, so that nothing inside need check again."""
    assert 0 <= sampling.seed < 2**63
    assert 0.0 <= sampling.temperature <= 2.0 and 0.0 < sampling.top_p <= 1.0 and 0.0 <= sampling.min_p <= 1.0
    assert sampling.top_k >= 0 and 0.0 < sampling.repetition_penalty <= 10.0
    assert abs(sampling.presence_penalty) <= 2.0 and abs(sampling.frequency_penalty) <= 2.0
