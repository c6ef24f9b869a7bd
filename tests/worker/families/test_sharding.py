"""A model divided over ranks computes what the whole one does, and each rank reads only its part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.iteration import SequenceSlice
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.shard import Shard
from headrace_worker.models.weights import TensorSource
from tests.worker.checkpoints import save_checkpoint
from tests.worker.families.ranks import CPU, Ranks
from tests.worker.families.variants import GEMMA, GEMMA_ROPES, QWEN3_MOE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

EIGHT: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama, biases": {**EIGHT, "attention_bias": True, "mlp_bias": True},
    "llama, odd vocabulary, tied": {**EIGHT, "vocab_size": 157, "tie_word_embeddings": True},
    "llama, fewer key-value heads than ranks": {**EIGHT, "num_key_value_heads": 2},
    "qwen2": {**EIGHT, "family": "Qwen2"},
    "gemma3": {**EIGHT, **GEMMA, **GEMMA_ROPES},
    "qwen3 moe": {**EIGHT, **QWEN3_MOE, "norm_topk_prob": True},
}
LAYOUTS = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
TOKENS = torch.randint(3, 157, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def pieces(start: int, end: int) -> list[SequenceSlice]:
    """A chunk of one sequence beside a growing one."""
    long = SequenceSlice(SequenceId(0), start, end - start, TOKENS[start:end], [BlockId(b) for b in range(5)], True)
    short = SequenceSlice(SequenceId(1), start // 9, 1, TOKENS[start // 9 :][:1], [BlockId(9)], True)
    return [long, short]


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_any_division_gives_the_same_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **changes)
    whole = Ranks(tmp_path, 1, 1)
    batches = [pieces(start, start + 9) for start in (0, 9, 18, 27)]
    expected = torch.cat([whole.logits(batch) for batch in batches])
    for tp_size, pp_size in LAYOUTS:
        ranks = Ranks(tmp_path, tp_size, pp_size)
        difference = (torch.cat([ranks.logits(batch) for batch in batches]) - expected).abs().amax()
        assert difference < 1e-5 * expected.abs().amax(), f"{tp_size} x {pp_size}"


@pytest.mark.parametrize("changes", [MODELS["gemma3"], MODELS["qwen3 moe"], EIGHT], ids=["gemma3", "moe", "llama"])
def test_norms_may_be_applied_apart_from_the_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **changes)
    expected = Ranks(tmp_path, 1, 1).logits(pieces(0, 30))
    for layout in ((1, 1), (2, 2)):
        actual = Ranks(tmp_path, *layout, folds_norms=False).logits(pieces(0, 30))
        assert (actual - expected).abs().amax() < 1e-5 * expected.abs().amax()


def test_a_tied_head_that_folds_nothing_is_the_embedding(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=True)
    checkpoint = open_checkpoint(tmp_path)
    packing = KeepsWeights()
    weights = read_decoder(
        checkpoint.config, checkpoint.source, packing, dtype=torch.float32, device=CPU, report=lambda done, total: None
    )
    assert weights.embedding is not None
    assert weights.head is not None
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


class KeepsWeights:
    folds_norms = False

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return weight

    gate_up = linear


class CountingSource:
    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.num_elements: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = self._source.read(name, rows, columns)
        self.num_elements[name] = self.num_elements.get(name, 0) + tensor.numel()
        return tensor


@pytest.mark.parametrize("changes", [EIGHT, MODELS["qwen3 moe"]], ids=["llama", "moe"])
def test_every_rank_reads_its_part_and_no_more(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=False, **changes)
    checkpoint = open_checkpoint(tmp_path)
    shares: dict[str, set[float]] = {}
    for pp_rank in range(3):
        source = CountingSource(checkpoint.source)
        read_decoder(
            checkpoint.config,
            source,
            TorchPacking(folds_norms=True),
            shard=Shard(1, 4, pp_rank, 3),
            dtype=torch.float32,
            device=CPU,
            report=lambda done, total: None,
        )
        layers = {name.split(".")[2] for name in source.num_elements if name.startswith("model.layers.")}
        assert layers == {str(pp_rank)}
        assert ("model.embed_tokens.weight" in source.num_elements) == (pp_rank == 0)
        assert ("lm_head.weight" in source.num_elements) == (pp_rank == 2)
        for name, count in source.num_elements.items():
            kind = name.split(".")[-2]
            shares.setdefault(kind, set()).add(count / checkpoint.source.read(name).numel())
    whole = {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "gate"}
    for kind, found in shares.items():
        assert found == ({1.0} if kind in whole else {0.25}), kind


@pytest.mark.parametrize(
    ("shard", "key"),
    [
        (Shard(0, 3), "tensor_parallel"),
        (Shard(0, 16), "tensor_parallel"),
        (Shard(2, 2), "tensor_parallel"),
        (Shard(0, 1, 0, 4), "pipeline_parallel"),
        (Shard(0, 1, -1, 2), "pipeline_parallel"),
    ],
)
def test_a_division_that_does_not_come_out_is_refused_before_anything_is_read(
    tmp_path: Path, shard: Shard, key: str
) -> None:
    save_checkpoint(tmp_path, **EIGHT)
    checkpoint = open_checkpoint(tmp_path)
    source = CountingSource(checkpoint.source)
    with pytest.raises(ConfigError) as raised:
        read_decoder(
            checkpoint.config,
            source,
            TorchPacking(folds_norms=True),
            shard=shard,
            dtype=torch.float32,
            device=CPU,
            report=lambda done, total: None,
        )
    assert raised.value.key == key
    assert not source.num_elements


def test_experts_that_the_grouped_product_does_not_take_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **{**EIGHT, **QWEN3_MOE, "moe_intermediate_size": 24})
    with pytest.raises(ConfigError, match="inner size of 6"):
        Ranks(tmp_path, 4, 1)


def test_ranges_cover_everything_once(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **{**EIGHT, "num_hidden_layers": 7, "vocab_size": 157})
    config = open_checkpoint(tmp_path).config
    for size in (1, 2, 3):
        stages = [Shard(0, 1, rank, size).layers(config) for rank in range(size)]
        assert [layer for stage in stages for layer in stage] == list(range(7))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
    ranks = [Shard(rank, 4) for rank in range(4)]
    assert [head for rank in ranks for head in rank.heads(config)] == list(range(8))
    assert [head for rank in ranks for head in rank.kv_heads(config)] == list(range(4))
    assert [index for rank in ranks for index in rank.inner(config)] == list(range(80))
    assert [token for rank in ranks for token in rank.vocabulary(config)] == list(range(160))
    assert [list(Shard(rank, 8).kv_heads(config)) for rank in range(8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]
