"""Each kernel against what limits it: memory bandwidth, or the rate of matrix products. Attention also against torch's
scaled_dot_product_attention."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.measuring import DEVICE, DTYPE, IS_DRY, Ceilings, ceilings, replayed_seconds
from benchmarks.gpu.report import Row, emit
from headrace_worker.attention.triton import TritonAttention
from headrace_worker.cuda.packing import InvariantPacking, QuantizedPacking
from headrace_worker.kernels.kv_write import write_kv
from headrace_worker.kernels.rotary import rotate
from headrace_worker.kernels.rows import act_mul, rms_norm
from headrace_worker.kernels.sampling import sample
from headrace_worker.kernels.sampling_table import Need, SamplingTable
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.decoder_weights import Packing
from headrace_worker.models.linear import Linear, TorchPacking

SECTION = "kernels"
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = (4, 2, 16, 16) if IS_DRY else (32, 8, 128, 16)
HIDDEN, INNER, VOCAB = (64, 128, 256) if IS_DRY else (4096, 14336, 128256)
DECODES = ((1, 40), (3, 20)) if IS_DRY else ((1, 131072), (8, 16384), (64, 4096), (256, 1024))
"""(sequences, positions)"""
PREFILLS = ((1, 24),) if IS_DRY else ((1, 8192), (4, 2048), (16, 512))
ROWS = 8 if IS_DRY else 8192
BATCHES = (1, 2) if IS_DRY else (1, 8, 64, 256)
VARIANTS = 4
"""Sets of inputs that take turns, so that none is in the cache from the time before."""
LONG_CONTEXT_TARGET = 0.85


def linears(limits: Ceilings) -> Iterator[Row]:
    """The matrices of one layer, in every form that weights can have."""
    shapes = (
        ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        (HIDDEN, HEADS * HEAD_DIM),
        (2 * INNER, HIDDEN),
        (HIDDEN, INNER),
    )
    num_weights = sum(rows * columns for rows, columns in shapes)
    packings: dict[str, tuple[Packing[Linear], float]] = {
        "cuBLAS": (TorchPacking(folds_norms=False), 2.0),
        "batch-invariant": (InvariantPacking(), 2.0),
        "int8": (QuantizedPacking("int8", VOCAB), 1.0),
        "int4": (QuantizedPacking("int4", VOCAB), 0.5),
        "fp8": (QuantizedPacking("fp8", VOCAB), 1.0),
    }
    for name, (packing, bytes_each) in packings.items():
        layers = [
            [packing.linear(torch.randn(shape, device=DEVICE).to(DTYPE), None) for shape in shapes]
            for _ in range(VARIANTS)
        ]
        for batch in BATCHES:
            inputs = [torch.randn(batch, width, device=DEVICE).to(DTYPE) for _, width in shapes]
            took_s = replayed_seconds(partial(_multiply, layers, inputs), VARIANTS)
            num_bytes = num_weights * bytes_each
            floor_s = max(num_bytes / limits.bytes_per_s, 2 * batch * num_weights / limits.flops_per_s)
            yield Row(
                SECTION,
                f"a layer's matrices, {batch} rows, {name}: {took_s * 1e6:.0f} µs",
                num_bytes / took_s / 1e9,
                "GB/s",
                floor_s / took_s,
                "roofline",
            )


def _multiply(layers: list[list[Linear]], inputs: list[Tensor], variant: int) -> None:
    for linear, rows in zip(layers[variant], inputs, strict=True):
        linear(rows)


def make_cache(num_blocks: int) -> KVCache:
    cache = KVCache(
        num_layers=VARIANTS,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        device=DEVICE,
    )
    cache.pages.normal_()
    return cache


def make_attention(cache: KVCache, sequences: int, tokens: int, context: int) -> TritonAttention:
    return TritonAttention(
        cache,
        num_heads=HEADS,
        max_sequences=sequences,
        max_tokens=tokens,
        context=context,
        scale=HEAD_DIM**-0.5,
        windows=[None] * VARIANTS,
    )


def scattered_tables(sequences: int, context: int) -> Tensor:
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0))
    return order.view(sequences, blocks).int().to(DEVICE)


def decode_attention(limits: Ceilings) -> Iterator[Row]:
    for sequences, context in DECODES:
        tables = scattered_tables(sequences, context)
        cache = make_cache(tables.numel())
        queries = torch.randn(sequences, HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
        prepared = make_attention(cache, sequences, sequences, context).plan(
            torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE),
            torch.full((sequences,), context, dtype=torch.int32, device=DEVICE),
            tables,
            num_decodes=sequences,
            num_tokens=sequences,
        )
        took_s = replayed_seconds(partial(_attend, prepared, queries), VARIANTS)
        num_bytes = sequences * context * 2 * KV_HEADS * HEAD_DIM * 2
        yield Row(
            SECTION,
            f"decode attention, {sequences} x {context} positions: {took_s * 1e6:.0f} µs",
            num_bytes / took_s / 1e9,
            "GB/s",
            num_bytes / took_s / limits.bytes_per_s,
            "copy bandwidth",
            LONG_CONTEXT_TARGET if context >= 4096 else None,
        )
        yield _torch_decode(sequences, context, limits)


def _attend(prepared: Callable[[int, Tensor], Tensor], queries: Tensor, variant: int) -> None:
    prepared(variant, queries)


def _torch_decode(sequences: int, context: int, limits: Ceilings) -> Row:
    """Keys and values in one piece, which no server can have."""
    shape = (VARIANTS, sequences, KV_HEADS, context, HEAD_DIM)
    keys, values = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2))
    queries = torch.randn(sequences, HEADS, 1, HEAD_DIM, device=DEVICE).to(DTYPE)

    def work(variant: int) -> None:
        F.scaled_dot_product_attention(queries, keys[variant], values[variant], enable_gqa=True)

    took_s = replayed_seconds(work, VARIANTS)
    num_bytes = sequences * context * 2 * KV_HEADS * HEAD_DIM * 2
    return Row(
        SECTION,
        f"torch SDPA on contiguous keys, {sequences} x {context} positions: {took_s * 1e6:.0f} µs",
        num_bytes / took_s / 1e9,
        "GB/s",
        num_bytes / took_s / limits.bytes_per_s,
        "copy bandwidth",
    )


def prefill_attention(limits: Ceilings) -> Iterator[Row]:
    for sequences, length in PREFILLS:
        tables = scattered_tables(sequences, length)
        cache = make_cache(tables.numel())
        tokens = sequences * length
        queries = torch.randn(tokens, HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
        prepared = make_attention(cache, sequences, tokens, length).plan(
            torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * length,
            torch.full((sequences,), length, dtype=torch.int32, device=DEVICE),
            tables,
            num_decodes=0,
            num_tokens=tokens,
        )
        flops = 2 * 2 * HEADS * HEAD_DIM * sequences * length**2 / 2
        took_s = replayed_seconds(partial(_attend, prepared, queries), VARIANTS)
        yield _rate(f"prefill attention, {sequences} x {length} tokens", flops, took_s, limits)
        shape = (sequences, HEADS, length, HEAD_DIM)
        heads, keys, values = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(3))

        def torch_attention(variant: int, heads: Tensor = heads, keys: Tensor = keys, values: Tensor = values) -> None:
            F.scaled_dot_product_attention(heads, keys, values, is_causal=True)

        backends = [SDPBackend.MATH] if IS_DRY else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        for backend in backends:
            with sdpa_kernel(backend):
                took_s = replayed_seconds(torch_attention, VARIANTS)
            yield _rate(f"torch SDPA ({backend.name.lower()}), {sequences} x {length} tokens", flops, took_s, limits)


def _rate(case: str, flops: float, took_s: float, limits: Ceilings) -> Row:
    return Row(
        SECTION,
        f"{case}: {took_s * 1e6:.0f} µs",
        flops / took_s / 1e12,
        "TFLOP/s",
        flops / took_s / limits.flops_per_s,
        "matrix rate",
    )


def rows(limits: Ceilings) -> Iterator[Row]:
    """What happens between the large operations, at as many tokens as an iteration has with a long prompt."""
    hidden = [torch.randn(ROWS, HIDDEN, device=DEVICE).to(DTYPE) for _ in range(VARIANTS)]
    residual = torch.randn(ROWS, HIDDEN, device=DEVICE).to(DTYPE)
    weight = torch.ones(HIDDEN, device=DEVICE)
    gate_up = [torch.randn(ROWS, 2 * INNER, device=DEVICE).to(DTYPE) for _ in range(VARIANTS)]
    qkv = [torch.randn(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE).to(DTYPE) for _ in range(VARIANTS)]
    rotations = torch.polar(torch.ones(ROWS, HEAD_DIM // 2), torch.rand(ROWS, HEAD_DIM // 2)).to(DEVICE)
    cache = make_cache(-(-ROWS // BLOCK_SIZE))
    slots = torch.randperm(ROWS, device=DEVICE)
    rotated = HEADS + KV_HEADS
    works: dict[str, tuple[Callable[[int], object], int]] = {
        "RMSNorm with residual": (
            lambda variant: rms_norm(hidden[variant], weight, epsilon=1e-5, residual=residual),
            4 * ROWS * HIDDEN * 2,
        ),
        "SiLU and product": (lambda variant: act_mul(gate_up[variant], "silu"), 3 * ROWS * INNER * 2),
        "rotation in place": (
            lambda variant: rotate(qkv[variant], rotated, rotations),
            2 * ROWS * rotated * HEAD_DIM * 2 + rotations.nbytes,
        ),
        "KV write": (
            lambda variant: write_kv(qkv[variant][:, HEADS:], slots, cache.pages[variant]),
            2 * ROWS * 2 * KV_HEADS * HEAD_DIM * 2,
        ),
    }
    for name, (work, num_bytes) in works.items():
        took_s = replayed_seconds(work, VARIANTS)
        yield Row(
            SECTION,
            f"{name}, {ROWS} tokens: {took_s * 1e6:.0f} µs",
            num_bytes / took_s / 1e9,
            "GB/s",
            num_bytes / took_s / limits.bytes_per_s,
            "copy bandwidth",
        )


def sampling(limits: Ceilings) -> Iterator[Row]:
    for batch in BATCHES:
        table = SamplingTable(batch, VOCAB, DEVICE)
        table.floats[:] = torch.tensor([0.8, 0.95, 0.0, 1.0, 0.0, 0.0], device=DEVICE, dtype=torch.float64)
        logits = [torch.randn(batch, VOCAB, device=DEVICE).to(DTYPE) for _ in range(VARIANTS)]
        slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        for name, need in (("greedy", Need()), ("top-p", Need(draws=True, filters=True))):
            took_s = replayed_seconds(partial(_sample, logits, slots, table, need), VARIANTS)
            yield Row(
                SECTION,
                f"sampling, {name}, {batch} rows",
                took_s * 1e6,
                "µs",
                logits[0].nbytes / took_s / limits.bytes_per_s,
                "one reading of the logits",
            )


def _sample(logits: list[Tensor], slots: Tensor, table: SamplingTable, need: Need, variant: int) -> None:
    sample(logits[variant], slots, table, need)


def main() -> None:
    limits = ceilings()
    emit(Row(SECTION, "copy bandwidth", limits.bytes_per_s / 1e9, "GB/s"))
    emit(Row(SECTION, "bfloat16 matrix rate", limits.flops_per_s / 1e12, "TFLOP/s"))
    for part in (decode_attention, prefill_attention, linears, rows, sampling):
        for row in part(limits):
            emit(row)
        if not IS_DRY:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
