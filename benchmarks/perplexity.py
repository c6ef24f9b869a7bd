"""What quantized weights cost in quality: perplexity on a bundled text, against bfloat16.

    python -m benchmarks.perplexity [--model smollm2-135m] [--tokens 12000] [--quantization int8 int4]

The built-in model comes from a file with 4 bits a weight (8 in the embedding), and int4 finds them again: for a model
that never was quantized, int4 costs more than it shows here.

The text is cut into pieces of 512 tokens; every token but a piece's first is predicted from those before it. Prints one
line for each quantization: perplexity, and how much worse that is.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.forward import Forward, load_forward
from headrace_worker.inputs import build_inputs
from headrace_worker.iteration import SequenceSlice
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.checkpoint import Checkpoint, open_checkpoint
from headrace_worker.models.source import find_model
from headrace_worker.native.packing import Quantization

TEXT = Path(__file__).parent / "texts" / "alice.txt"
PIECE = 512
BLOCK_SIZE = 16
CPU = torch.device("cpu")


class Scorer:
    """A model with one sequence's cache."""

    def __init__(self, checkpoint: Checkpoint, quantization: str) -> None:
        config = checkpoint.config
        bind = load_forward(
            config,
            checkpoint.source,
            native="auto",
            block_size=BLOCK_SIZE,
            context=PIECE,
            dtype=torch.bfloat16,
            device=CPU,
            report=lambda done, total: None,
            quantization=Quantization(quantization),
        )
        self._cache = KVCache.of_model(
            config, num_blocks=PIECE // BLOCK_SIZE, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=CPU
        )
        self._forward: Forward = bind(self._cache, PIECE)

    @torch.inference_mode()
    def loss(self, ids: Sequence[int]) -> float:
        """Nats for each predicted token."""
        pieces = [ids[start : start + PIECE] for start in range(0, len(ids) - 1, PIECE)]
        total = sum(float(self._losses(piece).sum()) for piece in pieces)
        return total / (len(ids) - len(pieces))

    def _losses(self, piece: Sequence[int]) -> Tensor:
        blocks = [BlockId(number) for number in range(self._cache.num_blocks)]
        inputs = build_inputs(
            [SequenceSlice(SequenceId(1), 0, len(piece), list(piece), blocks, True)],
            block_size=BLOCK_SIZE,
            num_kv_heads=self._cache.num_kv_heads,
            null_block=self._cache.null_block,
            gathered_positions=self._forward.gathered_positions,
            device=CPU,
        )
        logits = self._forward(inputs._replace(sampled_rows=torch.arange(len(piece) - 1)))
        return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(piece[1:]), reduction="none")


def token_ids(checkpoint: Checkpoint, num_tokens: int) -> list[int]:
    tokenizer = Tokenizer.from_buffer(checkpoint.make_card("", PIECE).tokenizer)
    return list(tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids[:num_tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=12_000, help="at most, from the text's beginning")
    parser.add_argument("--quantization", nargs="+", default=["int8", "int4"])
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(find_model(arguments.model).path)
    ids = token_ids(checkpoint, arguments.tokens)
    reference = Scorer(checkpoint, "none").loss(ids)
    print(f"{len(ids)} tokens; bfloat16: perplexity {math.exp(reference):.3f}", flush=True)
    for quantization in arguments.quantization:
        loss = Scorer(checkpoint, quantization).loss(ids)
        worse = math.expm1(loss - reference)
        print(f"{quantization}: perplexity {math.exp(loss):.3f}, {worse:+.2%}", flush=True)


if __name__ == "__main__":
    main()
