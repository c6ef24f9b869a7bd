"""What is said of the prefix cache never tells of other tenants."""

import pytest

from headrace_router.identity import Identity
from headrace_router.prompt import Prompt
from headrace_shared.api_keys import ApiKey
from tests.scheduler.builders import request

KEY = ApiKey(key_id="0" * 12, secret_hash=b"", name="", tenant="acme", flow=1, created=0)


@pytest.mark.parametrize(
    ("key", "is_shared", "given", "told"),
    [(KEY, False, "", 32), (KEY, False, "x", 32), (KEY, True, "", 0), (KEY, True, "x", 0), (None, False, "", 32)],
)
def test_cached_tokens_are_told_where_they_are_the_tenant_s_own(
    key: ApiKey | None, is_shared: bool, given: str, told: int
) -> None:
    identity = Identity("owner", key)
    salt = identity.cache_salt(given, is_shared=is_shared)
    prompt = Prompt(request(tenant=identity.tenant, salt=salt), [])
    assert prompt.told_cached == 0, "nothing is known yet"
    prompt.num_cached = 32
    assert prompt.told_cached == told
