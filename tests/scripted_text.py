"""The scripted engine with a byte-level model whose prompt says what it is to answer, for tests through the API.

The last JSON object in the prompt (or in a chat's messages) is the script:

    {"text": "abc"}                    one token a byte, then end of sequence
    {"pieces": ["two", " th"]}         these tokens, which are in the vocabulary, then end of sequence
    {"choices": ["a", "bcd"]}          another text for each choice
    {"echo": "abc"}                    the text for ever
    {"about": "prompt"}                tells the number of control tokens in the prompt and a digest of its ids
    {…, "fail_at": 10}                 the sequence fails at this output index
    {…, "exit_at": 10}                 the engine process exits

Without one the answer is empty. `python -m tests.scripted_text FD` is an engine process.
"""

import hashlib
import json
import os
import sys
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission
from headrace_worker.config import EngineConfig
from headrace_worker.engine_process import run
from headrace_worker.iteration import Report
from tests import scripted_engine
from tests.byte_model import byte_ids, byte_level_tokenizer, make_card, token_id
from tests.scripted_engine import ScriptedEngine, ScriptedSequence

PIECES = ("two", "wo", "Ġth", "ree", "win", "ter", "Ġtime")
"""Tokens of several letters that no merge makes: prompts are one token a byte, and the script may emit them."""


def text_tokenizer() -> Tokenizer:
    """That of the router's tests, with PIECES behind its vocabulary."""
    described = json.loads(byte_level_tokenizer().to_str())
    described["model"]["merges"] = []
    vocabulary = described["model"]["vocab"]
    vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(PIECES)}
    described["added_tokens"] = [
        token | {"id": len(vocabulary) + i} for i, token in enumerate(described["added_tokens"])
    ]
    return Tokenizer.from_str(json.dumps(described))


TOKENIZER = text_tokenizer()
END = token_id(TOKENIZER, "<|im_end|>")
CARD = make_card(tokenizer=TOKENIZER.to_str().encode(), vocab_size=TOKENIZER.get_vocab_size(), eos_token_ids=(END,))
CONTROL_IDS = frozenset(token_id for token_id, token in TOKENIZER.get_added_tokens_decoder().items() if token.special)


@lru_cache(maxsize=1024)
def script_of(prompt: bytes) -> dict[str, Any]:
    text = TOKENIZER.decode(unpack_ids(prompt).tolist())
    decoder = json.JSONDecoder()
    for start in range(text.rfind("{"), -1, -1):
        if text[start] == "{":
            try:
                script, _ = decoder.raw_decode(text, start)
            except ValueError:
                continue
            if isinstance(script, dict):
                return script
    return {}


def answer_of(prompt: bytes, choice: int) -> list[int]:
    """The ids of the answer, without what ends it."""
    script = script_of(prompt)
    if "pieces" in script:
        return [token_id(TOKENIZER, piece.replace(" ", "Ġ")) for piece in script["pieces"]]
    if script.get("about") == "prompt":
        ids = unpack_ids(prompt).tolist()
        num_control = sum(token in CONTROL_IDS for token in ids)
        return byte_ids(f"{num_control} {hashlib.sha256(prompt).hexdigest()[:16]}")
    if "choices" in script:
        return byte_ids(script["choices"][choice])
    return byte_ids(script.get("text") or script.get("echo") or "")


class TextSequence(ScriptedSequence):
    def __init__(self, admission: Admission) -> None:
        super().__init__(admission)
        self._script = script_of(admission.request.prompt)
        self._answer = answer_of(admission.request.prompt, admission.choice)

    def token(self, index: int) -> int:
        if "echo" in self._script:
            return self._answer[index % len(self._answer)]
        return self._answer[index] if index < len(self._answer) else END

    def mishap(self, index: int) -> str | None:
        if index == self._script.get("fail_at"):
            return "scripted error"
        if index == self._script.get("exit_at"):
            os._exit(7)
        return None


class TextEngine(ScriptedEngine):
    def make_sequence(self, admission: Admission) -> TextSequence:
        return TextSequence(admission)


def load(config: EngineConfig, report: Report) -> ScriptedEngine:
    return scripted_engine.load(config, report, TextEngine, CARD)


if __name__ == "__main__":
    sys.exit(run(load, sys.argv[1:]))
