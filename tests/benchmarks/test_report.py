"""The arithmetic that turns measurements into what is claimed."""

import pytest

from benchmarks.client import Summary
from benchmarks.limits import Limits, tokens_per_s
from benchmarks.peers.server import ServerSpec, Start
from benchmarks.report import Results, print_report
from headrace_worker.models.config import ModelConfig, Rope

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    attention_scale=0.125,
    norm_epsilon=1e-5,
    rope=Rope(theta=1e5),
    context=8192,
    ties_embeddings=True,
)


def run(tokens_per_s: float, ttft_ms: float = 100.0, itl_p99_ms: float = 100.0, num_complete: int = 8) -> Summary:
    return Summary(8, num_complete, tokens_per_s, ttft_ms, ttft_ms, ttft_ms, 10.0, itl_p99_ms)


def spec(name: str, weights: str = "bf16") -> ServerSpec:
    return ServerSpec(name, [], "m", {}, weights)


def test_limits_are_memory_for_one_request_and_arithmetic_for_many() -> None:
    machine = Limits(46.5e9, 840e9)
    assert tokens_per_s(SMOLLM2, machine, 1) == pytest.approx(140, rel=0.03)
    assert tokens_per_s(SMOLLM2, machine, 32) == pytest.approx(590, rel=0.03)
    assert tokens_per_s(SMOLLM2, machine, 1, weight_bits=5.0) > 1.5 * tokens_per_s(SMOLLM2, machine, 1)
    slow_memory = Limits(5e9, 840e9)
    assert tokens_per_s(SMOLLM2, slow_memory, 4) < 0.5 * tokens_per_s(SMOLLM2, slow_memory, 32)


def test_ratios_are_of_medians_to_the_best_peer_and_say_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results()
    for rate in (100.0, 140.0, 120.0):
        results.add("headrace", "16", run(rate, ttft_ms=50.0, itl_p99_ms=40.0))
    results.add("vllm", "16", run(80.0))
    results.add("llama-bf16", "16", run(90.0))
    results.add("headrace-int4", "16", run(150.0))
    results.add("llama-q4_0", "16", run(100.0))
    results.starts["headrace"] = [Start(1.0, 4.0)]
    results.memory["headrace"] = [{"engine": 900 << 20, "router": 100 << 20}]
    names = ("headrace", "headrace-int4", "vllm", "llama-bf16", "llama-q4_0")
    print_report(results, [spec(name) for name in names], SMOLLM2, Limits(46.5e9, 840e9))
    printed = capsys.readouterr().out
    assert "headrace / vllm or llama-bf16, tokens/s at 16: 1.33 (>= 1.3: met)" in printed
    assert "headrace-int4 / llama-q4_0, tokens/s at 16: 1.50 (>= 1.3: met)" in printed
    assert "headrace / vllm, ITL p99 at 16: 0.40 (<= 0.25: missed)" in printed
    assert "headrace / vllm, TTFT p50 at 16: 0.50 (<= 1.0: met)" in printed
    assert "1000: engine 900, router 100" in printed


def test_an_unanswered_request_spoils_the_run() -> None:
    with pytest.raises(RuntimeError, match="7 of 8 requests"):
        Results().add("headrace", "1", run(100.0, num_complete=7))
