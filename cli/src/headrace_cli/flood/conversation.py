"""What is asked: prompts of a wanted length, made of common words, and the bodies of requests. Pure.

No two conversations share their beginning by accident, since a prefix cache would then answer for the model; what is
to be shared is put before it.
"""

import random
from typing import Any, NamedTuple

from headrace_cli.flood.arrivals import Arrival
from headrace_cli.flood.lengths import Lengths, parse_lengths
from headrace_cli.flood.settings import FloodSettings

# Words that most vocabularies have whole, so that a word is about a token.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy music market sense
nation plan college interest death experience effect use class control field development role effort rate
heart drug show leader light voice wife police mind price report decision son view relationship town road arm
difference value building action season society tax director position player record paper space ground form
event official matter center couple site project activity star table need court oil situation cost industry
figure street image phone data picture practice piece land product doctor wall patient worker news test movie
north love support technology step baby computer type attention film tree source organization hair look
century evidence window culture chance brother energy period course summer plant opportunity term letter
condition choice rule south floor campaign material population call economy hospital church risk fire future
bank west sport board east goal property color
"""
WORDS = tuple(_TEXT.split())
LEAST_WORDS = 1


class Turn(NamedTuple):
    num_words: int
    num_output_tokens: int
    think_s: float
    """Before it is sent, from the answer before on."""


class Script(NamedTuple):
    """A conversation as it will go."""

    seed: int
    prefix: int
    turns: tuple[Turn, ...]


class Author:
    """Writes scripts and requests. The same settings give the same."""

    def __init__(self, settings: FloodSettings, model: str, tokens_per_word: float) -> None:
        """Raises ConfigError for lengths that cannot be read."""
        self._settings = settings
        self._model = model
        self._tokens_per_word = tokens_per_word
        self._prompts: Lengths = parse_lengths(settings.prompt_tokens, "--prompt-tokens")
        self._outputs: Lengths = parse_lengths(settings.output_tokens, "--output-tokens")
        self._prefixes: dict[int, str] = {}

    def script(self, number: int, arrival: Arrival) -> Script:
        """Of the conversation of this number."""
        settings = self._settings
        seed = (settings.seed << 32) + number
        rng = random.Random(seed)
        turns = []
        for turn in range(settings.turns):
            num_prompt = arrival.num_prompt_tokens or self._prompts.draw(rng)
            num_output = arrival.num_output_tokens or self._outputs.draw(rng)
            think_s = rng.expovariate(1.0 / settings.think) if turn and settings.think else 0.0
            turns.append(Turn(self._num_words(num_prompt), num_output, think_s))
        return Script(seed, number % settings.prefixes, tuple(turns))

    def message(self, script: Script, turn: int) -> str:
        """What the user says in that turn."""
        own = _text(f"{script.seed}/{turn}", script.turns[turn].num_words)
        if turn or not self._settings.prefix_tokens:
            return own
        if script.prefix not in self._prefixes:
            num_words = self._num_words(self._settings.prefix_tokens)
            self._prefixes[script.prefix] = _text(f"{self._settings.seed}/prefix/{script.prefix}", num_words)
        return f"{self._prefixes[script.prefix]} {own}"

    def body(self, messages: list[dict[str, str]], turn: Turn) -> dict[str, Any]:
        """`messages` ends with the user's."""
        settings = self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": turn.num_output_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.endpoint == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = messages[-1]["content"]
        if settings.ignore_eos:
            body["ignore_eos"] = True
        return body

    def _num_words(self, num_tokens: int) -> int:
        return max(LEAST_WORDS, round(num_tokens / self._tokens_per_word))


def _text(seed: str, num_words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))
