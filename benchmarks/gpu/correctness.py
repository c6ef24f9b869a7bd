"""Are the kernels right? Each against float32 or better, then the engine on them against a plain float32 forward pass,
then what it promises: no waiting between submit and collect, and results that do not depend on the batch.

Ends with an error at the end if anything is off, so that nothing wrong is timed.
"""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.gpu.engine import random_engine
from benchmarks.gpu.measuring import DEVICE, DTYPE, IS_DRY, relative_error
from benchmarks.gpu.report import Row, emit
from benchmarks.gpu.shapes import RandomWeights, model_config
from benchmarks.gpu.steady import GREEDY, run
from headrace_shared.messages import BlockId, SamplingParams, SequenceId
from headrace_worker.attention.triton import TritonAttention
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.forward import TorchForward
from headrace_worker.inputs import build_inputs
from headrace_worker.iteration import SequenceSlice
from headrace_worker.kernels import attention_reference, reference
from headrace_worker.kernels.matmul import matmul
from headrace_worker.kernels.rotary import rotate
from headrace_worker.kernels.rows import act_mul, rms_norm
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.communicator import SingleRank
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.reading import read_decoder

SECTION = "correctness"
BF16_ERROR = 1e-2
"""What rounding to bfloat16 explains, as a share of the result's norm."""
HEADS = ((2, 1, 16),) if IS_DRY else ((9, 3, 64), (32, 8, 128), (16, 16, 96), (8, 1, 256))
"""(query heads, key-value heads, head size)"""
LENGTHS = ((9, 20), (6, 2)) if IS_DRY else ((1500, 33, 4097, 16, 700), (700, 33, 129))
"""Context lengths of decoding sequences, and lengths of chunks (each behind as many cached positions again)."""
BLOCK_SIZE = 16


def check(case: str, error: float, most: float) -> Row:
    return Row(SECTION, case, error, "relative error", error / most, "what is allowed", 1.0, target_is_most=True)


def rows() -> Iterator[Row]:
    hidden, inner, tokens = (64, 96, 5) if IS_DRY else (4096, 14336, 333)
    values, residual = (_random(tokens, hidden) for _ in range(2))
    weight = torch.rand(hidden, device=DEVICE) + 0.5
    expected_residual = residual.float()
    expected = reference.rms_norm(values.float(), weight, epsilon=1e-5, residual=expected_residual)
    yield check(
        "RMSNorm with residual",
        relative_error(rms_norm(values, weight, epsilon=1e-5, residual=residual), expected),
        BF16_ERROR,
    )
    yield check("the residual", relative_error(residual, expected_residual), BF16_ERROR)
    gate_up = _random(tokens, 2 * inner)
    for activation in ("silu", "gelu_tanh"):
        expected = reference.act_mul(gate_up.float(), activation)
        yield check(activation, relative_error(act_mul(gate_up, activation), expected), BF16_ERROR)
    qkv = _random(tokens, 12, 64)
    rotations = torch.polar(torch.ones(tokens, 32), torch.rand(tokens, 32) * 100).to(DEVICE)
    expected = qkv.float()
    reference.rotate(expected, 8, rotations)
    rotate(qkv, 8, rotations)
    yield check("rotation", relative_error(qkv, expected), BF16_ERROR)
    for num_rows in (1, 5) if IS_DRY else (1, 7, 64, 333):
        left, right = _random(num_rows, hidden), _random(inner, hidden)
        product = matmul(left, right)
        yield check(
            f"batch-invariant product, {num_rows} rows",
            relative_error(product, left.float() @ right.float().T),
            BF16_ERROR,
        )


def attention() -> Iterator[Row]:
    """Decoding sequences and prompt chunks in one batch, blocks in random order, NaN in everybody else's."""
    decodes, chunks = LENGTHS
    contexts = [*decodes, *(2 * length for length in chunks)]
    counts = [1] * len(decodes) + list(chunks)
    for num_heads, num_kv_heads, head_dim in HEADS:
        blocks = [-(-length // BLOCK_SIZE) for length in contexts]
        cache = KVCache(
            num_layers=1,
            num_blocks=sum(blocks) + 5,
            block_size=BLOCK_SIZE,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=DTYPE,
            device=DEVICE,
        )
        cache.pages.fill_(torch.nan)
        order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(1)).int()
        tables = torch.full((len(contexts), max(blocks)), cache.null_block, dtype=torch.int32)
        taken = 0
        for row, (length, count) in enumerate(zip(contexts, blocks, strict=True)):
            tables[row, :count] = order[taken : taken + count]
            taken += count
            slots = torch.arange(length)
            slots = tables[row, slots // BLOCK_SIZE].long() * BLOCK_SIZE + slots % BLOCK_SIZE
            flat = cache.pages[0].transpose(2, 3)
            flat[slots.to(DEVICE) // BLOCK_SIZE, :, slots.to(DEVICE) % BLOCK_SIZE] = _random(
                length, 2, num_kv_heads, head_dim
            )
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        queries = _random(int(starts[-1]), num_heads, head_dim)
        for window in (None, 7 if IS_DRY else 300):
            backend = TritonAttention(
                cache,
                num_heads=num_heads,
                max_sequences=len(contexts),
                max_tokens=queries.shape[0],
                context=max(contexts),
                windows=[window],
            )
            lengths = torch.tensor(contexts, dtype=torch.int32)
            planned = backend.plan(
                starts.to(DEVICE),
                lengths.to(DEVICE),
                tables.to(DEVICE),
                num_decodes=len(decodes),
                num_tokens=queries.shape[0],
            )
            expected = attention_reference.attend(
                queries, cache.pages[0], tables.to(DEVICE), starts, lengths, scale=head_dim**-0.5, window=window
            )
            name = f"attention, {num_heads}/{num_kv_heads} heads of {head_dim}, window {window}"
            yield check(name, relative_error(planned(0, queries), expected.flatten(1)), BF16_ERROR)


def small_config() -> ModelConfig:
    """Few layers of the measured shape, so that a float32 copy fits beside."""
    if IS_DRY:
        return model_config(tiny=True)
    raw = model_config(tiny=False)
    from msgspec.structs import replace

    return replace(raw, num_layers=4, vocab_size=32000)


def build(config: ModelConfig, *, deterministic: bool) -> CudaEngine:
    sizes = Sizes(
        context=64 if IS_DRY else 1024,
        block_size=BLOCK_SIZE,
        num_blocks=16 if IS_DRY else 1024,
        max_sequences=2 if IS_DRY else 16,
        tokens_per_iteration=12 if IS_DRY else 512,
        memory_share=0.9,
    )
    return random_engine(config, sizes, deterministic=deterministic)


def plain_logits(config: ModelConfig, slices: Sequence[SequenceSlice], engine: CudaEngine) -> Tensor:
    """The same iteration in float32, with torch alone."""
    weights = read_decoder(
        config,
        RandomWeights(config, DEVICE),
        TorchPacking(folds_norms=False),
        dtype=torch.float32,
        device=DEVICE,
        report=lambda done, total: None,
    )
    cache = KVCache.of_model(
        config, num_blocks=engine.facts.num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE
    )
    forward = TorchForward(weights, SingleRank(), cache, engine.facts.context)
    return forward(
        build_inputs(
            slices,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            null_block=cache.null_block,
            gathered_positions=forward.gathered_positions,
            device=DEVICE,
        )
    )


def prompts(config: ModelConfig, lengths: Sequence[int]) -> list[SequenceSlice]:
    slices = []
    first = 0
    for number, length in enumerate(lengths):
        tokens = [(number * 977 + place * 131 + 7) % config.vocab_size for place in range(length)]
        count = -(-length // BLOCK_SIZE)
        blocks = [BlockId(first + index) for index in reversed(range(count))]
        first += count
        slices.append(SequenceSlice(SequenceId(number), 0, length, tokens, blocks, True))
    return slices


def engine() -> Iterator[Row]:
    config = small_config()
    slices = prompts(config, (7, 1) if IS_DRY else (300, 1, 64, 90))
    built = build(config, deterministic=False)
    error = relative_error(built.logits(slices), plain_logits(config, slices, built))
    # Rounding adds up over layers; float32 kernels that computed something else would be off by its whole norm.
    yield check("logits of a small model in bfloat16", error, 4 * BF16_ERROR)
    yield _without_waiting(built)
    del built
    yield _invariance(build(config, deterministic=True), slices)


def _without_waiting(built: CudaEngine) -> Row:
    """Prompts, recorded decoding and every way of sampling, while torch raises at whatever waits for the device."""
    everything = SamplingParams(
        seed=1, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, num_logprobs=3
    )
    batch, length = (2, 5) if IS_DRY else (8, 70)
    if not IS_DRY:
        run(built, batch, length, 2)
    inner, num_waits = built.submit, 0

    def submit(slices: Sequence[SequenceSlice]) -> None:
        nonlocal num_waits
        if not IS_DRY:
            torch.cuda.set_sync_debug_mode("error")
        try:
            inner(slices)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            num_waits += 1
            raise
        finally:
            if not IS_DRY:
                torch.cuda.set_sync_debug_mode("default")

    built.submit = submit  # type: ignore[method-assign]  # observed, not changed
    try:
        for sampling in (GREEDY, everything):
            run(built, batch, length, 1 if IS_DRY else 20, sampling)
    except RuntimeError as error:
        sys.stdout.write(f"RuntimeError: {error}\n")
    finally:
        del built.submit
    return Row(SECTION, "iterations that waited for the device", num_waits, "", float(num_waits), "none", 0.0, True)


def _invariance(built: CudaEngine, slices: list[SequenceSlice]) -> Row:
    """The largest difference in any logit between computed alone, with others, and in chunks: 0 is promised."""
    together = built.logits(slices)
    alone = torch.cat([built.logits([piece]) for piece in slices])
    first = slices[0]
    assert first.token_ids is not None
    half = first.num_tokens // 2
    built.logits([first._replace(num_tokens=half, token_ids=first.token_ids[:half], samples=True)])
    rest = first._replace(start=half, num_tokens=first.num_tokens - half, token_ids=first.token_ids[half:])
    chunked = built.logits([rest, *slices[1:2]])[:1]
    difference = max(float((together - alone).abs().max()), float((together[:1] - chunked).abs().max()))
    return Row(
        SECTION, "deterministic mode: difference between batches", difference, "", difference, "nothing", 0.0, True
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def main() -> int:
    num_wrong = 0
    for part in (rows, attention, engine):
        for row in part():
            emit(row)
            num_wrong += row.verdict == "missed"
    if num_wrong:
        sys.stdout.write(f"Error: {num_wrong} checks failed\n")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        sys.exit(main())
