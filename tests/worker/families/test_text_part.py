"""Gemma models that see images: their text part is run, and what their files leave out is what the family has."""

from pathlib import Path

import pytest
import torch

from headrace_worker.models.config import Rope, RopeScaling
from headrace_worker.models.hf_config import config_from_hf
from tests.worker.checkpoints import SIZES, load_tiny, save_tokenizer
from tests.worker.engine_driver import generate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


def test_the_text_part_answers_as_in_the_whole_model(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=12)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=157,
        boi_token_index=158,
        eoi_token_index=159,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    prompt = torch.randint(3, 150, (25,), generator=torch.Generator().manual_seed(1)).tolist()
    output = generate(load_tiny(tmp_path), prompt, 12)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
    assert output == logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


def test_a_published_file_that_says_little() -> None:
    config = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == Rope(theta=1e6, scaling=RopeScaling(kind="linear", factor=8.0))
    assert [layer for layer in range(34) if config.window(layer) is None] == [5, 11, 17, 23, 29]
    assert config.ties_embeddings
