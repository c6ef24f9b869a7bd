"""The endpoints over a real socket, with a scripted worker."""

from tests.byte_model import MODEL
from tests.router.support import prompt_of, running_router, says, sse_events


async def test_chat_whole_answer() -> None:
    async with running_router(says("Hello, wörld 🦉!")) as router:
        reply = await router.client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        [choice] = answer["choices"]
        said = "Hello, wörld 🦉!"
        assert choice["message"] == {"role": "assistant", "content": said, "refusal": None, "annotations": []}
        assert choice["finish_reason"] == "stop"
        num_prompt = len(prompt_of(router.worker.requests[0]))
        num_output = len("Hello, wörld 🦉!".encode()) + 1
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_chat_stream() -> None:
    async with running_router(says("Hello, wörld 🦉!")) as router:
        reply = await router.client.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "Hi"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = sse_events(reply.text)
        assert events[-1] == "[DONE]"
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
        assert text == "Hello, wörld 🦉!"
        assert events[-3]["choices"][0]["finish_reason"] == "stop"
        assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 20
        assert all(event["usage"] is None for event in events[:-2])


async def test_completion_whole_and_stream() -> None:
    async with running_router(says("abc")) as router:
        body = {"model": MODEL, "prompt": "Say abc"}
        whole = (await router.client.post("/v1/completions", json=body)).json()
        assert whole["object"] == "text_completion"
        assert whole["choices"][0]["text"] == "abc"
        reply = await router.client.post("/v1/completions", json={**body, "stream": True})
        events = sse_events(reply.text)
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc"
        assert all("usage" not in event for event in events[:-1])
