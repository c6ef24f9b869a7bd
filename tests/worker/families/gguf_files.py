"""Tiny GGUF files, written from transformers' models as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def write_family(path: Path, architecture: str, model: Any, **fields: Any) -> None:
    """`fields`: further metadata of the architecture."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in fields.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("gpt2")
    words = [*(chr(ord("a") + index) for index in range(26)), "ab"]
    num_control = config.vocab_size - len(words)
    writer.add_token_list([*words, *(f"<{index}>" for index in range(num_control))])
    writer.add_token_types([1] * len(words) + [3] * num_control)
    writer.add_token_merges(["a b"])
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(_own_name(name, architecture), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _own_name(name: str, architecture: str) -> str:
    *path, suffix = name.removeprefix("model.").split(".")
    if path[0] != "layers":
        return f"{_TOP_NAMES[path[0]]}.{suffix}"
    names = _NAMES | _GEMMA_NAMES if architecture == "gemma3" else _NAMES
    return f"blk.{path[1]}.{names['.'.join(path[2:])]}.{suffix}"
