"""The forward pass asks nothing of the device, as its capture in a CUDA graph demands.

Tensors of the meta device have shapes and types but no contents, so whatever would wait for contents raises.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.communicator import SingleRank
from headrace_worker.models.decoder import Decoder
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.torch_operations import TorchOperations
from tests.worker.checkpoints import VOCAB_SIZE, save_checkpoint
from tests.worker.families.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

META = torch.device("meta")


@pytest.mark.parametrize("name", ["llama, tied", "gemma3", "qwen3", "mixtral", "qwen3 moe"])
def test_no_contents_are_needed(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = VARIANTS[name]
    save_checkpoint(tmp_path, **changes)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    weights = read_decoder(
        config,
        checkpoint.source,
        TorchPacking(folds_norms=False),
        dtype=torch.bfloat16,
        device=META,
        report=lambda done, total: None,
    )
    decoder = Decoder(weights, TorchOperations(config.norm_epsilon, META), SingleRank(), context=64, device=META)
    token_ids, positions = (torch.empty(7, dtype=torch.int64, device=META) for _ in range(2))

    def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        assert keys_values.shape == (7, 2 * config.num_kv_heads, config.head_dim)
        return torch.empty_like(queries, memory_format=torch.contiguous_format).flatten(1)

    hidden = decoder.run(decoder.embed(token_ids), positions, attend)
    logits = decoder.logits(hidden[:3])
    assert (logits.device, logits.shape, logits.dtype) == (META, (3, VOCAB_SIZE), torch.bfloat16)
