"""Calls of both generating endpoints, whole and streamed, seen as one thing: what the client gets."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WAYS = [(CHAT, False), (CHAT, True), (TEXT, False), (TEXT, True)]
"""(endpoint, streamed)"""


@dataclass
class Choice:
    text: str = ""
    finish: str | None = None
    num_finishes: int = 0
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    num_done: int = 0
    deltas: list[str] = field(default_factory=list)
    """Of a stream: the text in each chunk, empty ones left out."""
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish(self) -> str | None:
        return self.choices[0].finish

    def add(self, part: dict[str, Any]) -> None:
        """A whole answer or a chunk."""
        self.error = part.get("error", self.error)
        self.usage = part.get("usage") or self.usage
        for told in part.get("choices", []):
            choice = self.choices.setdefault(told["index"], Choice())
            text = told.get("message", told.get("delta", told)).get("content", told.get("text")) or ""
            choice.text += text
            if text:
                self.deltas.append(text)
            if told["finish_reason"] is not None:
                choice.finish = told["finish_reason"]
                choice.num_finishes += 1
            logprobs = told.get("logprobs")
            if logprobs is not None:
                choice.logprobs += logprobs["content"] if "content" in logprobs else logprobs["token_logprobs"]

    def outcome(self) -> dict[int, tuple[str, str | None]]:
        """Text and finish reason of each choice."""
        return {index: (choice.text, choice.finish) for index, choice in sorted(self.choices.items())}


def body_of(path: str, prompt: Any, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """`prompt`: text, or a script for `tests.scripted_text`."""
    if isinstance(prompt, dict):
        prompt = json.dumps(prompt, ensure_ascii=False)
    asked = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    body = {"model": MODEL, **asked, "stream": stream} | fields
    if stream and "stream_options" not in fields:
        body["stream_options"] = {"include_usage": True}
    return body


async def ask(
    client: httpx.AsyncClient,
    path: str,
    prompt: Any,
    stream: bool = False,
    *,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> Answer:
    """Raises AssertionError unless the status is 200 and a stream ends with one [DONE]."""
    answer = Answer()
    body = body_of(path, prompt, stream, **fields)
    if not stream:
        reply = await client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        answer.headers = reply.headers
        answer.add(reply.json())
        return answer
    async with client.stream("POST", path, json=body, headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        answer.headers = reply.headers
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                answer.num_done += 1
            elif line.startswith("data: "):
                assert not answer.num_done, line
                answer.add(json.loads(line.removeprefix("data: ")))
    assert answer.num_done == 1
    return answer
