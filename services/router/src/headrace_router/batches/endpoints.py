"""Where a batch's lines may go: one entry for each endpoint."""

from headrace_router.batches.execution import Answer
from headrace_router.calls import Caller


def batch_endpoints(caller: Caller) -> dict[str, Answer]:
    """Path -> who answers a call there: whole, through `Call.send`, by the call's headers and identity."""
    return {
        "/v1/chat/completions": caller.chat,
        "/v1/completions": caller.completion,
        "/v1/embeddings": caller.embedding,
    }
