"""What goes to clients: server-sent events, and the function calls that are found in a model's text."""

import json
from random import Random

import msgspec

from headrace_router import sse
from headrace_router.call_reader import CallReader
from headrace_router.call_record import AnswerForm
from headrace_router.choices import ChoiceDelta, ChoiceText, Usage
from headrace_router.detokenization import Vocabulary
from headrace_router.responses import Formatter, Identity, to_json, usage_object
from headrace_router.tools import CallFormat, ToolUse
from headrace_shared.messages import FinishReason, RequestId, TokenFrame, TokenLogprobs, TopLogprob
from tests.fuzz.fuzzing import Target
from tests.fuzz.mutation import mutate_bytes, mutate_text

TEXTS = (
    b"Hello.\r\n\r\ndata: [DONE]\n\nid: 7\n\nevent: error\n",
    "é 中文 😀 \u2028 \u2029 \x00 \x1b[31m \ufeff".encode(),
    b"\xff\xfe\xed\xa0\x80 ill-formed \xf0\x9f\x98",
)
CALLS = (
    b'<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}</tool_call> and more',
    b'{"name": "f", "parameters": {"a": "\\u00e9"}}; {"name": "g", "arguments": {}}',
    b'[TOOL_CALLS] [{"name": "f", "arguments": {"x": null}}]',
)
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)], frozenset({0}))


def targets() -> list[Target]:
    return [
        Target("answer: a stream of events", TEXTS, mutate_bytes, _stream, ()),
        Target("answer: function calls", CALLS, mutate_text, _calls, ()),
    ]


def _stream(data: bytes) -> None:
    """One token a byte: whatever a model says, a reader of events gets that text, and as many events as were sent."""
    data = data[:600]
    random = Random(data)
    is_chat, num_logprobs = random.random() < 0.5, random.choice((None, 0, 2))
    identity = Identity("id", 1, "m\n\ndata: x")
    form = AnswerForm(
        is_chat=is_chat,
        stream=True,
        include_usage=True,
        continuous_usage=True,
        skip_special_tokens=False,
        stop_strings=(),
        include_stop=False,
    )
    formatter = Formatter(identity, VOCABULARY, form, num_logprobs=num_logprobs)
    choice = ChoiceText(VOCABULARY, skip_special=False)
    written, num_events, position = b"", 0, 0
    while position <= len(data):
        piece = data[position : position + random.randrange(1, 5)]
        position += len(piece) or 1
        is_last = position >= len(data)
        frame = TokenFrame(
            request_id=RequestId("0" * 32),
            choice=0,
            attempt=0,
            index=position,
            tokens=tuple(piece),
            logprobs=() if num_logprobs is None else tuple(_logprobs(random) for _ in piece),
            finish=FinishReason.LENGTH if is_last else None,
        )
        chunk = formatter.chunk(ChoiceDelta(0, choice.push(frame)), usage_object(Usage(1, position, 0)))
        if chunk is not None:
            written += sse.event(to_json(chunk), event_id=f"{position}")
            num_events += 1
        if is_last:
            break
    told = _read_events(written + sse.PING + sse.DONE)
    assert told.pop() == b"[DONE]"
    assert len(told) == num_events
    answers = [json.loads(event) for event in told]
    assert all(answer["model"] == identity.model for answer in answers)
    text = "".join(
        (answer["choices"][0]["delta"].get("content") if is_chat else answer["choices"][0]["text"]) or ""
        for answer in answers
    )
    assert text == data.decode(errors="replace"), (text, data)


def _logprobs(random: Random) -> TokenLogprobs:
    value = random.choice((-0.5, float("-inf"), float("nan"), 0.0))
    return TokenLogprobs(value, (TopLogprob(random.randrange(300), value), TopLogprob(7, -1.5)))


def _read_events(stream: bytes) -> list[bytes]:
    """As browsers do: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation"""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        name, _, value = line.partition(b":")
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" "))
        else:
            assert name in (b"", b"id"), line
    return events


def _calls(data: bytes) -> None:
    """Where the text is cut makes no difference, nothing is said twice, and names are those that were given."""
    text = data.decode(errors="replace")[:3000]
    random = Random(data)
    for form in CallFormat:
        use = ToolUse(format=form, names=("f", "g"), is_parallel=random.random() < 0.5)
        whole = CallReader(use).push(text, is_last=True)
        reader = CallReader(use)
        shown, position = "", 0
        arguments: dict[int, str] = {}
        while position < len(text) or not text:
            end = position + random.randrange(1, 200)
            found = reader.push(text[position:end], is_last=end >= len(text))
            shown += found.text
            for piece in found.calls:
                arguments[piece.number] = arguments.get(piece.number, "") + piece.arguments
            position = end
            if not text:
                break
        assert shown == whole.text
        assert arguments == {piece.number: piece.arguments for piece in whole.calls}
        assert all(piece.name in use.names for piece in whole.calls)
        msgspec.json.encode(arguments)
