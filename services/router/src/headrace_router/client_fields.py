"""What a client says about itself and about how its call is to be handled, which changes no token. Pure."""

import json

from headrace_router.call_limits import MAX_METADATA_BYTES, MAX_NAME_CHARS, MAX_SALT_CHARS, SERVICE_TIERS
from headrace_router.schemas import GenerationBody
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import Lane

NOT_IN_SALTS = "@/\\\0"


def check_client_fields(body: GenerationBody) -> None:
    """Raises InvalidRequest, naming the field."""
    for field, value in (
        ("user", body.user),
        ("safety_identifier", body.safety_identifier),
        ("prompt_cache_key", body.prompt_cache_key),
        ("prompt_cache_retention", body.prompt_cache_retention),
        ("session_id", body.session_id),
        ("request_id", body.request_id),
    ):
        if value is not None and len(value) > MAX_NAME_CHARS:
            raise InvalidRequest(f"'{field}' may have at most {MAX_NAME_CHARS} characters.", param=field)
    if body.metadata and len(json.dumps(body.metadata)) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"'metadata' may have at most {MAX_METADATA_BYTES} bytes.", param="metadata")
    if body.service_tier is not None and body.service_tier not in SERVICE_TIERS:
        raise InvalidRequest(f"'service_tier' must be one of {', '.join(SERVICE_TIERS)}.", param="service_tier")
    if body.priority:
        raise InvalidRequest(
            "'priority' must be 0: the class of a call is that of its API key.",
            param="priority",
            code="unsupported_parameter",
        )


def salt_of(body: GenerationBody) -> str:
    """Raises InvalidRequest."""
    salt = body.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARS or any(char in salt for char in NOT_IN_SALTS):
        raise InvalidRequest(
            f"'cache_salt' must have 1 to {MAX_SALT_CHARS} characters and none of @ / \\ NUL.", param="cache_salt"
        )
    return salt


def tier_of(lane: Lane, priority: int) -> str:
    """What a call gets, in OpenAI's words."""
    if lane is Lane.BATCH:
        return "flex"
    return "priority" if priority > 0 else "default"
