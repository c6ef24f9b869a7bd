"""How the engine calls the kernels of sampling, for the check that compiles them without a GPU."""

from collections.abc import Mapping
from typing import Any

from headrace_worker.kernels.jit import Kernel
from headrace_worker.kernels.sampling import BLOCK, REFINE_WARPS
from headrace_worker.kernels.sampling_draw import finish, likeliest, run_chunks
from headrace_worker.kernels.sampling_filter import HISTOGRAM, LEVELS, NUM_STEPS, refine, shift_of
from headrace_worker.kernels.sampling_scores import adjust
from headrace_worker.kernels.sampling_table import FLOATS, INTEGERS, MAX_BIASES, MAX_STOP_IDS
from headrace_worker.kernels.specialization import Specialization
from headrace_worker.race import CHUNK

VOCAB_BLOCKS = 64
"""Of a vocabulary of 262144, the largest there is."""

_TYPES = {
    "logits": "*bf16",
    "slots": "*i32",
    "integers": "*i64",
    "floats": "*fp64",
    "counts": "*i32",
    "stop_ids": "*i32",
    "bias_ids": "*i32",
    "biases": "*fp32",
    "masks": "*i32",
    "mask_rows": "*i32",
    "scores": "*fp32",
    "peaks": "*fp32",
    "peak_tokens": "*i32",
    "raw_peaks": "*fp32",
    "raw_sums": "*fp32",
    "chunk_peaks": "*fp32",
    "histograms": "*i64",
    "prefixes": "*i32",
    "targets": "*fp64",
    "floors": "*i32",
    "arrivals": "*fp64",
    "arrival_chunks": "*i32",
    "drawn": "*i64",
    "finite": "*i8",
    "logprobs": "*fp32",
    "totals": "*fp32",
    "top_ids": "*i32",
    "top_logprobs": "*fp32",
    "vocab_size": "i32",
    "logits_stride": "i32",
    "mask_stride": "i32",
    "padded_size": "i32",
    "num_blocks": "i32",
    "num_chunks": "i32",
    "num_logprobs": "i32",
}
_SIZES = {
    "NUM_INTEGERS": len(INTEGERS),
    "NUM_FLOATS": len(FLOATS),
    "MAX_STOP_IDS": MAX_STOP_IDS,
    "MAX_BIASES": MAX_BIASES,
    "HISTOGRAM": HISTOGRAM,
    "BLOCK": BLOCK,
    "BLOCKS": VOCAB_BLOCKS,
    "CHUNKS": VOCAB_BLOCKS * BLOCK // CHUNK,
}
_OF_DRAWS = ("scores", "arrivals", "arrival_chunks")
_OF_FILTERS = ("histograms", "prefixes", "targets", "floors")
_OF_LOGPROBS = ("raw_sums", "chunk_peaks", "totals", "logprobs")
_OF_GRAMMARS = ("masks", "mask_rows")
_ALL = {"DRAWS": True, "FILTERS": True, "LOGPROBS": True}
_GREEDY = {"DRAWS": False, "FILTERS": False, "LOGPROBS": False}


def _specialization(
    name: str, kernel: Kernel, num_warps: int, constants: Mapping[str, Any], *, has_grammars: bool = False
) -> Specialization:
    unused = [
        *(() if constants.get("DRAWS", True) else _OF_DRAWS),
        *(() if constants.get("FILTERS", True) else _OF_FILTERS),
        *(() if constants.get("LOGPROBS", True) else _OF_LOGPROBS),
        *(() if has_grammars else _OF_GRAMMARS),
    ]
    known: dict[str, Any] = {**_SIZES, **constants, **dict.fromkeys(unused)}
    names: list[str] = kernel.arg_names
    return Specialization(
        name,
        kernel,
        {name: _TYPES[name] for name in names if name not in known},
        {name: known[name] for name in names if name in known},
        {"num_warps": num_warps},
        attributes={"padded_size": 16} if "padded_size" in names else {},
    )


SPECIALIZATIONS = [
    _specialization("sample: adjust[greedy]", adjust, 8, _GREEDY),
    _specialization("sample: adjust[all]", adjust, 8, _ALL),
    _specialization("sample: adjust[all, grammars]", adjust, 8, _ALL, has_grammars=True),
    *(
        _specialization(
            f"sample: refine[{step}]", refine, REFINE_WARPS, {"STEP": step, "SHIFT": shift_of(step), "FILTERS": True}
        )
        for step in (0, 1, LEVELS, NUM_STEPS - 1)  # the others differ from these in constants only
    ),
    _specialization("sample: run_chunks", run_chunks, 8, {"FILTERS": True}),
    _specialization("sample: finish[greedy]", finish, 4, _GREEDY),
    _specialization("sample: finish[all]", finish, 4, _ALL),
    _specialization("sample: likeliest", likeliest, 4, {}),
]
