"""What comes from disk: GGUF and safetensors files, and the configurations beside them."""

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from headrace_shared.codec import encode
from headrace_shared.errors import ConfigError
from headrace_worker.adapters.config import AdapterRefused
from headrace_worker.adapters.weights import AdapterReader
from headrace_worker.models.card import card_from_folder, card_from_gguf
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_config import gguf_config
from headrace_worker.models.gguf_tensors import GgufTensors
from headrace_worker.models.hf_config import config_from_hf
from headrace_worker.models.reading import check_weights
from headrace_worker.models.small_files import read_json
from headrace_worker.models.weights import SafetensorsFolder
from tests.fuzz.fuzzing import Target
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.worker.checkpoints import SIZES, save_tokenizer
from tests.worker.tiny_gguf import write_gguf

CONFIG: dict[str, Any] = {
    **SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "query_pre_attn_scalar": 256,
    "torch_dtype": "bfloat16",
}
LLAMA3: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
YARN: dict[str, Any] = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}
GENERATION: dict[str, Any] = {"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9, "top_k": 40}
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": {"content": "t1"},
    "eos_token": "t2",
    "add_bos_token": True,
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
}
INDEX: dict[str, Any] = {"metadata": {"total_size": 12}, "weight_map": {"model.norm.weight": "model.safetensors"}}


def targets(folder: Path) -> list[Target]:
    """`folder`: for the files; nothing else is in it."""
    write_gguf(folder / "seed.gguf", {"output_norm.weight": np.ones(48, dtype=np.float32)})
    gguf = (folder / "seed.gguf").read_bytes()
    tensors = {"model.norm.weight": torch.ones(48), "lm_head.weight": torch.ones(4, 48, dtype=torch.float16)}
    weights = save(tensors, metadata={"format": "pt"})
    head_end = 8 + struct.unpack_from("<Q", weights)[0]
    (rank, alpha), shape = (2, 4), (SIZES["hidden_size"], SIZES["hidden_size"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    pair = {name.format("A"): torch.ones(rank, shape[1]), name.format("B"): torch.ones(shape[0], rank)}
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    adapter = [json.dumps(adapter_config).encode(), save(pair)]
    model = folder / "model"
    model.mkdir()
    save_tokenizer(model)
    tokenizer = (model / "tokenizer.json").read_bytes()
    return [
        Target("checkpoint: a GGUF file", [gguf], mutate_bytes, _gguf(folder), (ConfigError,)),
        Target("checkpoint: a safetensors file", [weights], mutate_bytes, _safetensors(folder), (ConfigError,)),
        Target(
            "checkpoint: a safetensors header",
            [weights[8:head_end]],
            mutate_json,
            _safetensors_header(folder, weights[head_end:]),
            (ConfigError,),
        ),
        Target(
            "checkpoint: config.json",
            [json.dumps(each).encode() for each in (CONFIG, LLAMA3, YARN)],
            mutate_json,
            _config(folder),
            (ConfigError,),
        ),
        Target("checkpoint: an adapter's weights", [adapter[1]], mutate_bytes, _adapter(adapter[0]), (AdapterRefused,)),
        Target(
            "checkpoint: an adapter's configuration",
            [adapter[0]],
            mutate_json,
            lambda data: _adapter(data)(adapter[1]),
            (AdapterRefused,),
        ),
        _small_file(model, "generation_config.json", GENERATION),
        _small_file(model, "tokenizer_config.json", TOKENIZER_CONFIG),
        Target("checkpoint: tokenizer.json", [tokenizer], mutate_json, _card(model, "tokenizer.json"), (ConfigError,)),
        Target(
            "checkpoint: an index of weights", [json.dumps(INDEX).encode()], mutate_json, _index(folder), (ConfigError,)
        ),
    ]


def _gguf(folder: Path) -> Callable[[bytes], None]:
    path = folder / "model.gguf"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        file = GgufFile(path)
        for name in file.tensors:
            file.tensor(name)
        config = gguf_config(file)
        check_weights(config, GgufTensors(file, config))
        encode(card_from_gguf(file, name="m", vocab_size=config.vocab_size, context=64))

    return run


def _safetensors(folder: Path) -> Callable[[bytes], None]:
    own = Path(tempfile.mkdtemp(dir=folder))

    def run(data: bytes) -> None:
        (own / "model.safetensors").write_bytes(data)
        source = SafetensorsFolder(own)
        for name in ("model.norm.weight", "lm_head.weight"):
            if name in source:
                source.shape(name)
                source.read(name)
        check_weights(config_from_hf(LLAMA3), source)

    return run


def _safetensors_header(folder: Path, tensors: bytes) -> Callable[[bytes], None]:
    whole = _safetensors(folder)
    return lambda header: whole(struct.pack("<Q", len(header)) + header + tensors)


def _adapter(config: bytes) -> Callable[[bytes], None]:
    empty = SafetensorsFolder.__new__(SafetensorsFolder)  # norms are not folded in: it is not asked
    reader = AdapterReader(
        config_from_hf(LLAMA3),
        empty,
        folds_norms=False,
        max_rank=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )

    def run(data: bytes) -> None:
        reader.read(config, data)

    return run


def _config(folder: Path) -> Callable[[bytes], None]:
    path = folder / "config.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        config = config_from_hf(read_json(path))
        assert config.num_parameters > 0 and config.kv_bytes_per_token(2) > 0

    return run


def _small_file(model: Path, name: str, content: dict[str, Any]) -> Target:
    (model / name).write_text(json.dumps(content))
    return Target(
        f"checkpoint: {name}", [json.dumps(content).encode()], mutate_json, _card(model, name), (ConfigError,)
    )


def _card(model: Path, name: str) -> Callable[[bytes], None]:
    path = model / name
    sound = path.read_bytes()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            encode(card_from_folder(model, name="m", vocab_size=160, context=64))
        finally:
            path.write_bytes(sound)

    return run


def _index(folder: Path) -> Callable[[bytes], None]:
    own = Path(tempfile.mkdtemp(dir=folder))
    (own / "model.safetensors").write_bytes(save({"model.norm.weight": torch.ones(48)}))
    (own / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")

    def run(data: bytes) -> None:
        (own / "model.safetensors.index.json").write_bytes(data)
        SafetensorsFolder(own)

    return run
