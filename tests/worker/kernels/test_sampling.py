"""Sampling on the device beside sampling on the CPU: the same tokens, since the noise and the race are the same."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_shared.messages import SamplingParams, StopParams, TokenLogprobs, TopLogprob
from headrace_worker.kernels.sampling import BLOCK, Masks, Sampled, Workspace, sample
from headrace_worker.kernels.sampling_table import Need, SamplingTable
from headrace_worker.sampling import NOT_FINITE, Drawn, SamplingState
from headrace_worker.sampling import sample as sample_on_cpu
from tests.worker.engine_driver import make_admission

VOCAB_SIZE = BLOCK + 3 * 128 + 5


class Both:
    """The same sequences on the device and on the CPU."""

    def __init__(self, device: torch.device, given: list[dict[str, Any]], vocab_size: int = VOCAB_SIZE) -> None:
        self.device = device
        self.table = SamplingTable(len(given) + 2, vocab_size, device)
        self.states = []
        self.need = Need()
        self.slots = torch.arange(len(given), dtype=torch.int32, device=device) + 1
        for index, params in enumerate(given):
            params = dict(params)
            fixed = {name: params.pop(name) for name in ("output", "choice", "stop") if name in params}
            prompt = params.pop("prompt", (1, 2, 3))
            sampling = SamplingParams(**{"seed": index + 1, "temperature": 1.0, **params})
            admission = make_admission(prompt, sampling, **fixed)
            self.states.append(SamplingState(admission, vocab_size))
            self.need |= self.table.assign(index + 1, admission)

    def draw(self, logits: Tensor) -> tuple[list[Drawn], list[Drawn]]:
        """(from the device, from the CPU)"""
        found = sample(logits.to(self.device), self.slots, self.table, self.need)
        return self.listed(found), sample_on_cpu(logits, self.states)

    def listed(self, found: Sampled) -> list[Drawn]:
        results = []
        for row, (token, finite) in enumerate(zip(found.tokens.tolist(), found.finite.tolist(), strict=True)):
            wanted = self.states[row].params.num_logprobs
            logprobs = None
            if wanted is not None and finite:
                assert found.logprobs is not None
                ids = [] if found.top_ids is None else found.top_ids[row].tolist()
                values = [] if found.top_logprobs is None else found.top_logprobs[row].tolist()
                top = tuple(TopLogprob(token, value) for token, value in zip(ids, values, strict=True))
                logprobs = TokenLogprobs(float(found.logprobs[row]), top[:wanted])
            results.append(Drawn(token, logprobs, None if finite else NOT_FINITE))
        return results


def logits_of(seed: int, rows: int, width: int = VOCAB_SIZE, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread


def agree(found: list[Drawn], expected: list[Drawn]) -> None:
    assert [item.error for item in found] == [item.error for item in expected]
    tokens = [(one.token, other.token) for one, other in zip(found, expected, strict=True) if other.error is None]
    assert [one for one, _ in tokens] == [other for _, other in tokens]
    for one, other in zip(found, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=2e-5)
            values = [top.logprob for top in other.logprobs.top]
            assert [top.logprob for top in one.logprobs.top] == pytest.approx(values, abs=2e-5)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9, "num_logprobs": 3},
    {"temperature": 1.0, "min_p": 0.05, "choice": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "output": (5, 6, 5)},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5, "output": (9,) * 4},
    {"temperature": 0.7, "logit_bias": {11: 4.0, 12: -100.0, 4300: 6.0, 9_000_000: 100.0}},
    {"temperature": 1.0, "stop": StopParams(max_tokens=9, min_tokens=3, stop_token_ids=(0, 1, 4200))},
    {"temperature": 0.0, "num_logprobs": 0},
    {"temperature": 1.0, "seed": (1 << 63) - 1},
    {"temperature": 1.1, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1, "num_logprobs": 5},
]


def test_draws_what_the_cpu_draws(device: torch.device) -> None:
    both = Both(device, MIXED)
    for step in range(2):
        agree(*both.draw(logits_of(step, len(MIXED))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_from_logits_of_two_bytes(device: torch.device, dtype: torch.dtype) -> None:
    both = Both(device, [MIXED[2], MIXED[4], MIXED[5]], vocab_size=300)
    for step in range(2):
        agree(*both.draw(logits_of(step, 3, 300).to(dtype)))


def test_a_small_vocabulary_and_rows_that_lie_apart(device: torch.device) -> None:
    both = Both(device, [{"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0, "num_logprobs": 7}], vocab_size=7)
    found, expected = both.draw(logits_of(3, 3, width=20, spread=1.0)[:, 5:12])
    agree(found, expected)
    assert found[2].logprobs is not None and expected[2].logprobs is not None
    assert [top.token for top in found[2].logprobs.top] == [top.token for top in expected[2].logprobs.top]


def test_the_largest_vocabulary(device: torch.device) -> None:
    size = 262_144
    both = Both(device, [{"top_p": 0.7, "num_logprobs": 2}], vocab_size=size)
    agree(*both.draw(logits_of(4, 1, size)))


FLAT = torch.linspace(1.0, 0.0, 40)[None, torch.randperm(40, generator=torch.Generator().manual_seed(3))]
RANKED = FLAT[0].argsort(descending=True).tolist()


def kept(device: torch.device, logits: Tensor, **params: Any) -> set[int]:
    """The tokens whose weights top-k and top-p keep."""
    both = Both(device, [params], vocab_size=logits.shape[1])
    work = Workspace.for_rows(1, logits.shape[1], both.need, device)
    sample(logits.to(device), both.slots, both.table, both.need, work=work)
    assert work.scores is not None and work.floors is not None
    weights = work.scores[0, : logits.shape[1]]
    return set(torch.nonzero(weights.view(torch.int32) >= work.floors[0]).flatten().tolist())


@pytest.mark.parametrize("k", [1, 17, 39])
def test_top_k_keeps_the_k_likeliest(device: torch.device, k: int) -> None:
    assert kept(device, FLAT, top_k=k) == set(RANKED[:k])


@pytest.mark.parametrize("p", [0.01, 0.5, 0.97])
def test_top_p_keeps_the_smallest_sufficient_set(device: torch.device, p: float) -> None:
    probabilities = torch.softmax(FLAT[0].double(), -1)[RANKED].numpy()
    size = int(np.searchsorted(probabilities.cumsum(), p)) + 1
    assert kept(device, FLAT, top_p=p) == set(RANKED[:size])


def test_top_p_counts_only_what_top_k_left(device: torch.device) -> None:
    probabilities = torch.softmax(FLAT[0, RANKED[:10]].double(), -1).numpy()
    size = int(np.searchsorted(probabilities.cumsum(), 0.5)) + 1
    assert kept(device, FLAT, top_k=10, top_p=0.5) == set(RANKED[:size])


def test_equals_of_the_last_token_kept_are_kept_too(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert kept(device, logits, top_k=2) == {0, 1, 2, 3}
    assert kept(device, logits, top_p=0.6) == {0, 1, 2, 3}


@pytest.mark.parametrize(("k", "p"), [(100, 1.0), (3000, 0.9), (0, 0.99)])
def test_thresholds_in_a_large_vocabulary_are_exact(device: torch.device, k: int, p: float) -> None:
    """Weights of the same upper bits, so that every pass must find its own."""
    logits = 1e-3 * logits_of(11, 1, VOCAB_SIZE)
    logits[0, 77] = 0.1
    weights = (logits[0] - logits.max()).exp().double()
    ordered, ids = weights.sort(descending=True)
    ordered, ids = (ordered[:k], ids[:k]) if k else (ordered, ids)
    size = int(torch.searchsorted(ordered.cumsum(0), p * ordered.sum())) + 1 if p < 1.0 else k
    found = kept(device, logits, top_k=k, top_p=p)
    # Rounding of the exponential may make neighbours equal.
    assert set(ids[: size - 2].tolist()) <= found
    assert size <= len(found) <= size + 3


def test_top_k_beyond_what_has_any_weight_keeps_all_of_it(device: torch.device) -> None:
    logits = torch.full((1, 300), -math.inf)
    logits[0, [7, 200]] = 0.0
    both = Both(device, [{"top_k": 100, "top_p": 0.999, "seed": seed} for seed in range(4)], vocab_size=300)
    agree(*both.draw(logits.repeat(4, 1)))


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(device: torch.device) -> None:
    both = Both(device, [{"min_p": 0.6, "seed": seed} for seed in range(12)], vocab_size=40)
    agree(*both.draw(FLAT.repeat(12, 1)))


@pytest.mark.parametrize("temperature", [1e-300, 1e-4, 2e-4, 1e30])
def test_no_temperature_overflows(device: torch.device, temperature: float) -> None:
    logits = logits_of(5, 4, 300, spread=1e4)
    logits[:, 7] = -math.inf
    both = Both(device, [{"temperature": temperature}] * 4, vocab_size=300)
    agree(*both.draw(logits))


def test_a_row_that_is_not_finite_fails_alone_and_does_not_move_on(device: torch.device) -> None:
    both = Both(device, [{}, {"top_p": 0.5}, {"top_k": 4}, {"temperature": 0.0}, {"num_logprobs": 2}], vocab_size=300)
    logits = logits_of(6, 5, 300)
    broken = logits.clone()
    broken[0, 3], broken[1, 299] = math.nan, math.inf
    broken[3] = -math.inf
    found, expected = both.draw(broken)
    agree(found, expected)
    assert [item.token for item in found if item.error] == [0, 0, 0]
    agree(*both.draw(logits))


def test_rows_without_a_slot_are_left_out(device: torch.device) -> None:
    both = Both(device, [{"num_logprobs": 1}, {"top_p": 0.9}, {"temperature": 0.0}], vocab_size=300)
    logits = logits_of(7, 3, 300)
    before = both.table.integers.clone()
    slots = both.slots.clone()
    slots[1] = -1
    found = sample(logits.to(device), slots, both.table, both.need)
    _, expected = both.draw(logits)
    assert found.tokens.tolist() == [expected[0].token, 0, expected[2].token]
    assert found.finite.tolist() == [1, 1, 1]
    moved = (both.table.integers - before)[:, 2].tolist()
    assert moved == [0, 2, 1, 2, 0]


def test_the_order_of_the_rows_does_not_matter(device: torch.device) -> None:
    logits = logits_of(8, len(MIXED))
    expected = sample_on_cpu(logits, Both(device, MIXED).states)
    both = Both(device, MIXED)
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(1))
    found = sample(logits[order].to(device), both.slots[order.to(device)], both.table, both.need)
    assert found.tokens.tolist() == [expected[row].token for row in order.tolist()]


@pytest.mark.parametrize("index", [5, 7, 10])
def test_a_new_admission_goes_on_where_the_last_one_stopped(device: torch.device, index: int) -> None:
    params = MIXED[index]
    rows = [logits_of(100 + step, 1, 300) for step in range(4)]
    both = Both(device, [params], vocab_size=300)
    whole = [both.draw(row)[0][0].token for row in rows]
    output = (*params.get("output", ()), *whole[:2])
    again = Both(device, [{**params, "output": output}], vocab_size=300)
    assert [again.draw(row)[0][0].token for row in rows[2:]] == whole[2:]


def test_a_slot_forgets_its_last_sequence(device: torch.device) -> None:
    table = SamplingTable(1, 300, device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    logits = logits_of(9, 1, 300)
    penalized: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {5: 9.0}}, (9,) * 4),
        ({"temperature": 0.0, "presence_penalty": 9.1}, ()),
        ({"temperature": 0.0}, ()),
    )
    for params, output in penalized:
        admission = make_admission((1, 2), SamplingParams(**{"seed": 3, **params}), output=output)
        need = table.assign(0, admission)
        found = sample(logits.to(device), slots, table, need)
        assert found.tokens.tolist() == [sample_on_cpu(logits, [SamplingState(admission, 300)])[0].token]


def test_the_likeliest_come_in_order_and_equals_by_id(device: torch.device) -> None:
    both = Both(device, [{"temperature": 0.0, "num_logprobs": 6}], vocab_size=600)
    logits = torch.zeros(1, 600)
    logits[0, [500, 3, 130, 129]] = torch.tensor([2.0, 2.0, 2.0, 5.0])
    found, _ = both.draw(logits)
    assert found[0].logprobs is not None
    assert [top.token for top in found[0].logprobs.top] == [129, 3, 130, 500, 0, 1]


def test_refuses_what_it_cannot_draw(device: torch.device) -> None:
    table = SamplingTable(2, 300, device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="logits has the shape"):
        sample(torch.zeros(1, 200, device=device), slots, table, Need())
    with pytest.raises(ValueError, match=r"slots is torch\.int64"):
        sample(torch.zeros(1, 300, device=device), slots.long(), table, Need())
    with pytest.raises(ValueError, match="1000 logprobs"):
        sample(torch.zeros(1, 300, device=device), slots, table, Need(num_logprobs=1000))
    many = {token: 1.0 for token in range(2000)}
    with pytest.raises(ValueError, match="2000 biases"):
        SamplingTable(1, 3000, device).assign(0, make_admission((1,), SamplingParams(seed=1, logit_bias=many)))


def test_a_mask_leaves_only_the_tokens_it_allows(device: torch.device) -> None:
    given: list[dict[str, Any]] = [{"temperature": 0.0, "num_logprobs": 2}, {"temperature": 1.0}, {"top_p": 0.9}, {}]
    both = Both(device, given)
    logits = logits_of(4, 4)
    allowed = torch.rand(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) < 0.01
    allowed[:, -1] = True
    bits = np.zeros((2, -(-VOCAB_SIZE // 32) * 32), dtype=np.uint8)
    bits[:, :VOCAB_SIZE] = allowed.numpy()
    words = torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32))
    masks = Masks(words.to(device), torch.tensor([1, -1, 0, -1], dtype=torch.int32, device=device))
    found = both.listed(sample(logits.to(device), both.slots, both.table, both.need, masks=masks))
    # The log-probabilities are those of the bare logits, so only the tokens can be compared with masked ones.
    masked = logits.clone()
    masked[0, ~allowed[1]] = -torch.inf
    masked[2, ~allowed[0]] = -torch.inf
    expected = sample_on_cpu(masked, both.states)
    assert [item.token for item in found] == [item.token for item in expected]
    bare = torch.log_softmax(logits[0], dim=-1)
    assert found[0].logprobs is not None
    assert found[0].logprobs.logprob == pytest.approx(float(bare[found[0].token]), abs=2e-5)
