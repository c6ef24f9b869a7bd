"""Position and expected wait, as a waiting client is told. Pure.

Comments of a stream (lines that begin with a colon) are for people: parsers skip them, and some stumble over them.
Events of a type of their own come only to clients that asked: others would take them for chunks of the answer.
"""

from typing import Any

import msgspec

from headrace_router.model_queue import Place
from headrace_shared.messages import RequestId

EVENT = b"headrace.queue"


def comment(place: Place) -> bytes:
    eta = "" if place.first_token_s is None else f", eta {place.first_token_s:.1f} s"
    return f": position {place.position}{eta}\n\n".encode()


def typed_event(place: Place, request_id: RequestId) -> bytes:
    data = msgspec.json.encode({"object": EVENT.decode(), "id": request_id, **fields(place)})
    return b"event: " + EVENT + b"\ndata: " + data + b"\n\n"


def fields(place: Place) -> dict[str, Any]:
    eta_s = None if place.first_token_s is None else round(place.first_token_s, 3)
    return {"position": place.position, "eta_s": eta_s}
