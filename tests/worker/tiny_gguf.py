"""A tiny GGUF file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.worker.checkpoints import SIZES


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **more: Any) -> None:
    """A llama-architecture file with the sizes of `checkpoints.py`."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    letters = sorted(map(chr, range(ord("a"), ord("a") + 26)))
    words = [*letters, "ab"]
    num_control = SIZES["vocab_size"] - len(words)
    writer.add_token_list([*words, *(f"<{index}>" for index in range(num_control))])
    writer.add_token_types([1] * len(words) + [3] * num_control)
    writer.add_token_merges(["a b"])
    for key, value in more.items():
        writer.add_string(key.replace("_", "."), value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
