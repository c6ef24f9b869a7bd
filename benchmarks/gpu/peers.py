"""The same model by transformers' generate, for scale."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.measuring import DEVICE, IS_DRY, ceilings
from benchmarks.gpu.model import BATCHES, NUM_PROMPT, decode_floor_s
from benchmarks.gpu.report import Row, emit
from benchmarks.gpu.shapes import model_config, raw_config

SECTION = "peers"
NUM_DECODES = 2 if IS_DRY else 24


def load() -> Any:
    import transformers

    raw = raw_config(tiny=IS_DRY)
    config = transformers.LlamaConfig(**{key: value for key, value in raw.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def timed(work: Callable[[], object]) -> float:
    if not IS_DRY:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if not IS_DRY:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    warnings.simplefilter("ignore")
    config = model_config(tiny=IS_DRY)
    limits = ceilings()
    model = load()
    for batch in BATCHES:
        ids = torch.randint(0, config.vocab_size, (batch, NUM_PROMPT), device=DEVICE)

        def generate(num_new: int, ids: torch.Tensor = ids) -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )

        try:
            generate(2)
            first_s = timed(lambda: generate(1))
            all_s = timed(lambda: generate(1 + NUM_DECODES))
        except torch.OutOfMemoryError as error:
            emit(Row(SECTION, f"transformers generate, batch {batch}", 0.0, "tokens/s", note=f"{error}"[:60]))
            continue
        decode_s = max(1e-9, all_s - first_s) / NUM_DECODES
        floor_s = decode_floor_s(config, batch, NUM_PROMPT + NUM_DECODES // 2, limits)
        emit(
            Row(
                SECTION,
                f"transformers generate, decode, batch {batch}: {decode_s * 1e3:.2f} ms a token",
                batch / decode_s,
                "tokens/s",
                floor_s / decode_s,
                "roofline",
            )
        )
        emit(
            Row(
                SECTION,
                f"transformers generate, first token, {batch} x {NUM_PROMPT} tokens",
                batch * NUM_PROMPT / first_s,
                "tokens/s",
            )
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
