"""An engine on a CPU loads no library that it does not compute with: each costs its start a second or so, and its
memory a tenth."""

import subprocess
import sys
from pathlib import Path

from tests.worker.checkpoints import save_checkpoint
from tests.worker.families.variants import VARIANTS

SCRIPT = """
import sys
from headrace_worker.config import EngineConfig
from headrace_worker.engine_process import _warm_up
from headrace_worker.loop import IterationLoop
from headrace_worker.parallel.loading import load

for model in sys.argv[1:]:
    engine = load(EngineConfig(model=model, device="cpu", num_blocks=64), lambda what, done, total: None)
    _warm_up(IterationLoop(engine), engine.facts)
print(*sorted({"torch._dynamo", "sympy", "transformers", "triton", "huggingface_hub"} & sys.modules.keys()))
"""
FAMILIES = ("llama, untied, biases", "llama, yarn", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3 moe")


def loaded_by(*models: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *models], check=True, timeout=200, stdout=subprocess.PIPE)
    return done.stdout.decode().strip()


def test_the_built_in_model_needs_torch_alone() -> None:
    assert loaded_by("smollm2-135m") == ""


def test_so_does_every_family(tmp_path: Path) -> None:
    for number, name in enumerate(FAMILIES):
        save_checkpoint(tmp_path / str(number), **VARIANTS[name])
    assert loaded_by(*(str(tmp_path / str(number)) for number in range(len(FAMILIES)))) == ""
