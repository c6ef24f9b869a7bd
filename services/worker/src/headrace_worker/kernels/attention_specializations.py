"""How models call the attention kernels, for the check that compiles them without a GPU."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from headrace_worker.kernels import attention_decode, attention_prefill
from headrace_worker.kernels.attention_arguments import FP8, Arguments
from headrace_worker.kernels.attention_tiles import decode_tile, prefill_tile
from headrace_worker.kernels.specialization import Specialization

MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


class Case(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_fp8: bool = False
    window: int | None = None
    is_capped: bool = False
    block_size: int = 16
    element: str = "bf16"

    @property
    def arguments(self) -> Arguments:
        return Arguments(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            is_fp8=self.is_fp8,
            words=torch.empty(0, dtype=FP8 if self.is_fp8 else torch.bfloat16),
            inner_scale=1.0,
            outer_scale=1.0,
            is_capped=self.is_capped,
        )

    @property
    def name(self) -> str:
        marks = [
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}",
            self.element,
            *(["fp8 cache"] if self.is_fp8 else []),
            *(["window"] if self.window else []),
            *(["capped"] if self.is_capped else []),
            *([f"blocks of {self.block_size}"] if self.block_size != 16 else []),
        ]
        return ", ".join(marks)

    @property
    def signature(self) -> dict[str, str]:
        """Of what both kernels take."""
        element = f"*{self.element}"
        return {
            "queries": element,
            "pages": "*i16" if self.is_fp8 else element,
            "block_table": "*i32",
            "output": element,
            **({"kv_scales": "*fp32"} if self.is_fp8 else {}),
            "inner_scale": "fp32",
            "outer_scale": "fp32",
            "query_stride": "i32",
            "table_stride": "i32",
        }

    @property
    def given(self) -> dict[str, Any]:
        """Constants that are not the kernels' own."""
        return {"ASSEMBLY": True, **({} if self.is_fp8 else {"kv_scales": None})}


DECODE = [
    Case(32, 8, 128),
    Case(40, 8, 128, is_fp8=True),
    Case(8, 4, 256, is_capped=True),
    Case(9, 3, 64),
    Case(9, 3, 64, is_fp8=True),
    Case(32, 32, 80, element="fp16"),
    Case(64, 1, 128, block_size=32),
    Case(8, 4, 256, is_fp8=True),
]
PREFILL = [
    Case(32, 8, 128),
    Case(28, 4, 128, is_fp8=True, block_size=32),
    Case(8, 4, 256, window=1024),
    Case(32, 8, 128, window=4096, is_capped=True),
    Case(9, 3, 64),
    Case(9, 3, 64, is_fp8=True, window=4096),
    Case(32, 32, 80, element="fp16"),
    Case(8, 4, 256, is_fp8=True, window=1024),
]
NUM_EVERYWHERE = 3
"""The first ones are compiled for every GPU, all for sm_90: compiling takes seconds each."""


def _all() -> Iterator[Specialization]:
    for capability, instruction in MATRIX.items():
        for case in DECODE if capability == 90 else DECODE[:NUM_EVERYWHERE]:
            tile = decode_tile(case.head_dim, case.arguments.group, case.is_fp8, capability)
            yield Specialization(
                f"attend_decode[{case.name}] for sm_{capability}",
                attention_decode._attend,
                {
                    **case.signature,
                    "pieces": "*i32",
                    "first_pieces": "*i32",
                    "partials": "*fp32",
                    "statistics": "*fp32",
                    "num_rows": "i32",
                },
                {**attention_decode.decode_constants(case.arguments, tile), **case.given},
                tile.options,
                {capability: instruction},
                {"query_stride": 16},
                (capability,),
            )
        for case in PREFILL if capability == 90 else PREFILL[:NUM_EVERYWHERE]:
            tile = prefill_tile(case.head_dim, case.is_fp8, capability)
            yield Specialization(
                f"attend_prefill[{case.name}] for sm_{capability}",
                attention_prefill._attend,
                {**case.signature, "query_starts": "*i32", "context_lengths": "*i32", "pieces": "*i32"},
                {**attention_prefill.prefill_constants(case.arguments, tile, case.window), **case.given},
                tile.options,
                {capability: instruction},
                {"query_stride": 16},
                (capability,),
            )


SPECIALIZATIONS = list(_all())
