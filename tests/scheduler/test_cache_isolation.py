"""Nobody is served a block that another tenant's request has computed, whatever has happened before."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.identity import Identity
from headrace_shared.api_keys import ApiKey
from headrace_shared.messages import FinishReason
from tests.scheduler.builders import add, admissions, advance, facts, request, scheduler, step

SALTS = ("", "a", "b", "a\0b", "tenant-a")
"""That a client may send with its request: those with NUL are refused, and would change nothing."""
TENANTS = ("", "a", "b", "tenant-a")


def salt_of(tenant: str, given: str) -> str:
    key = ApiKey(key_id="0" * 12, secret_hash=b"", name="", tenant=tenant, flow=1, created=0) if tenant else None
    return Identity("owner", key).cache_salt(given, is_shared=False)


def test_no_two_of_tenant_and_salt_give_the_same() -> None:
    given = [(tenant, salt) for tenant in TENANTS for salt in SALTS]
    assert len({salt_of(*each) for each in given}) == len(given)


calls = st.tuples(st.sampled_from(TENANTS), st.sampled_from(SALTS), st.integers(0, 2), st.integers(17, 80))
"""Tenant, salt, which of three beginnings, length."""


@settings(max_examples=200, deadline=None)
@given(st.lists(calls, min_size=2, max_size=25))
def test_what_is_cached_was_computed_for_the_same_tenant(history: Sequence[tuple[str, str, int, int]]) -> None:
    """Also with so few blocks that they go from hand to hand."""
    made = scheduler(facts(num_blocks=12))
    computed: dict[tuple[str, str, int], int] = {}
    for number, (tenant, salt, beginning, length) in enumerate(history):
        prompt = [1000 * beginning + position for position in range(length)]
        add(made, request(f"r{number}", prompt=prompt, max_tokens=1, salt=salt_of(tenant, salt), tenant=tenant))
        [admission] = admissions(step(made))
        most = computed.get((tenant, salt, beginning), 0)
        assert admission.num_cached <= min(most, length - 1) // 16 * 16
        advance(made, admission.sequence_id, length, 1, finish=FinishReason.STOP, released=True)
        step(made)
        computed[tenant, salt, beginning] = max(most, length)


def test_a_tenant_meets_its_own_blocks_again() -> None:
    """Else the test above would pass with no cache at all."""
    made = scheduler(facts())
    cached = []
    for name, tenant in (("first", "a"), ("second", "b"), ("third", "a")):
        add(made, request(name, prompt=64, max_tokens=1, salt=salt_of(tenant, "x"), tenant=tenant))
        [admission] = admissions(step(made))
        cached.append(admission.num_cached)
        advance(made, admission.sequence_id, 64, 1, finish=FinishReason.STOP, released=True)
        step(made)
    assert cached == [0, 0, 48]
