"""What a flood is made of."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from headrace_shared.errors import ConfigError
from headrace_shared.settings import Secret

MAX_REQUESTS = 1_000_000
"""Of one run: what is kept of each takes about 200 bytes."""

Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]


class FloodSettings(Struct, frozen=True, kw_only=True):
    url: str = "http://127.0.0.1:8000"
    """Address of a router, or of any server with OpenAI's interface."""
    model: str = ""
    """Model to ask; empty: the first that the server lists."""
    api_key: Secret = ""
    """Key to send, if the server wants one."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Which interface to use."""
    rate: Annotated[float, Meta(gt=0, le=100_000)] | None = None
    """Open loop: conversations begun a second, on average, however slowly the server answers."""
    concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Closed loop: so many conversations run at any time; each that ends is followed by another."""
    duration: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """Seconds in which conversations are begun."""
    warmup: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """First seconds of these that are left out of the figures."""
    drain: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Longest time to wait afterwards for answers that are still coming."""
    arrivals: Literal["poisson", "constant", "burst", "ramp"] = "poisson"
    """Open loop: at random (a Poisson process of exactly rate x duration arrivals), at equal gaps, in groups of
    burst-size at once, or at a rate that rises evenly from 0 to twice the rate."""
    burst_size: Annotated[int, Meta(ge=1, le=100_000)] = 10
    """Conversations begun at once, with --arrivals burst."""
    trace: str = ""
    """Open loop: a file of arrivals, one JSON object a line: timestamp (ms), input_length, output_length."""
    trace_speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """How many times faster than it was recorded the trace is played."""
    prompt_tokens: str = "128"
    """Length of prompts: N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or choice:N:N:…"""
    output_tokens: str = "64"
    """Length of answers, in the same way."""
    prefix_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """First tokens of each prompt that are shared with others, beyond its own length."""
    prefixes: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Number of different shared prefixes, dealt out evenly."""
    turns: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Requests of a conversation: each carries the ones before and their answers. With --endpoint chat only."""
    think: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Mean seconds between an answer and the next turn, exponentially distributed."""
    ignore_eos: bool = True
    """Ask for answers of the full length. Servers that do not know ignore_eos want --no-ignore-eos."""
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    """Randomness of the answers."""
    slo_ttft: Milliseconds = 1000.0
    """An answer is good if its first token comes within so many ms of the moment when it was due …"""
    slo_tpot: Milliseconds = 100.0
    """… and the later ones take no more than so many ms each, on average."""
    timeout: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """Longest time of a request in seconds."""
    max_open: Annotated[int, Meta(ge=1, le=100_000)] = 20_000
    """Most conversations at once; those that would be more are counted as errors."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """The same seed makes the same arrivals and prompts."""
    json: str = ""
    """File for the report as JSON; - is standard output."""
    html: str = ""
    """File for the report as a page with plots."""

    @property
    def is_open_loop(self) -> bool:
        return self.concurrency is None

    def check(self) -> None:
        """Raises ConfigError for what no single field shows."""
        given = [self.rate is not None, self.concurrency is not None, bool(self.trace)]
        if sum(given) != 1:
            raise ConfigError("--rate", "give one of --rate, --concurrency and --trace")
        if self.warmup >= self.duration:
            raise ConfigError("--warmup", "must be shorter than --duration")
        if self.turns > 1 and self.endpoint != "chat":
            raise ConfigError("--turns", "needs --endpoint chat")
        most = self.turns * (self.rate or 0.0) * self.duration
        if most > MAX_REQUESTS:
            raise ConfigError("--rate", f"gives {most:.0f} requests in all; at most {MAX_REQUESTS} are possible")
