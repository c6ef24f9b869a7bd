"""Answers to HTTP/1.0, whose clients know no chunks (RFC 9112, 6.1): what has no length ends with its connection."""

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The application, as it answers the request of `cycle`, which closes the connection behind it."""

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_plainly(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                # The server knows three ways to end a body: this one has the length that it turns out to have.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
