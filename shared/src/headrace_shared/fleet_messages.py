"""What services say about themselves and to each other about the fleet: workers, models, commands, figures, loads. Data
only, as in `messages.py`, whose rules hold here.
"""

from enum import StrEnum

from msgspec import Struct

from headrace_shared.messages import RouterId, WorkerId


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    LEAVING = "leaving"
    PARKED = "parked"
    """Loaded and warm, but without a cache for sequences: it takes nothing until it is promoted."""


class CommandKind(StrEnum):
    DRAIN = "drain"
    """Take nothing new, let others have what runs, and leave."""
    PARK = "park"
    """The same, but stay, parked."""
    PROMOTE = "promote"
    """Be ready: out of parking, or out of a drain that is under way."""


class LoadedAdapter(Struct, frozen=True, array_like=True):
    """What has become of an adapter on one worker."""

    name: str
    digest: str
    """SHA-256 of its files, as hexadecimal digits; empty if it could not be read."""
    problem: str = ""
    """Why the worker cannot serve it; empty: it can."""
    revision: int = 0
    """Of the record that this is the answer to; 0: it was told of it at its start."""


class Hello(Struct, frozen=True, tag=True, kw_only=True):
    """What a worker is. Sent at each change of state and once a second."""

    worker: WorkerId
    model: str
    state: WorkerState
    epoch: int
    """Of the lease it obeys; 0 if none yet."""
    num_blocks: int
    block_size: int
    context: int
    """Most tokens (prompt and output) of one sequence: the model's context or the whole cache, whichever is less."""
    max_sequences: int
    """Most sequences that take part in one iteration."""
    tokens_per_iteration: int
    failure: str = ""
    """Why it leaves, if not because it was told to: its engine died or hangs, say."""
    hang_timeout_s: float = 0.0
    """After so long without an iteration it gives its engine up by itself; 0 if it does not say."""
    promotion_s: float = 0.0
    """While parked: how long it will take to be ready once it is told to."""
    is_parking: bool = False
    """While draining (or loading): it will be parked and not leave."""
    command_epoch: int = 0
    """The highest of the commands that it has had: it obeys no lower one."""
    adapters: tuple[LoadedAdapter, ...] = ()
    """Those that it was told to load."""
    device: str = ""
    """cpu, cuda:N, or timing:GPU where a GPU's time is taken and nothing computed; empty until its model is loaded."""
    dtype: str = ""
    """Number format of weights and cache: float32, bfloat16 or float16."""


class WorkerCommand(Struct, frozen=True, tag=True, kw_only=True):
    """What a worker is to become. Idempotent; the latest one counts, and Hello shows what became of it."""

    worker: WorkerId
    kind: CommandKind
    command_id: str = ""
    """Random, and different for each command. The reply repeats it."""
    sender: str = ""
    """Where the reply goes: a token of a subject. Empty: nobody waits for one."""
    epoch: int = 0
    """Of the lease of the leading autoscaler, who is obeyed only with the highest that the worker has seen; 0: an
    operator's, always obeyed."""
    sent_at: float = 0.0
    """Seconds since the epoch. Each command is taken once, and only within a minute of it."""


class CommandReply(Struct, frozen=True, tag=True, kw_only=True):
    """Sent once it is known whether a command is obeyed: within a few seconds, unless the worker dies."""

    worker: WorkerId
    command_id: str
    is_accepted: bool
    state: WorkerState
    message: str = ""
    """For a person: why not, or how."""


class ModelCard(Struct, frozen=True, tag=True, kw_only=True):
    """All that a router needs to serve a model without its weights. Kept in the broker, so it outlives the workers."""

    model: str
    tokenizer: bytes
    """tokenizer.json of the `tokenizers` library."""
    vocab_size: int
    """Width of the logits."""
    context: int
    """As in Hello; the smallest of the workers that wrote it since the model was deployed."""
    eos_token_ids: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""
    adds_bos: bool = False
    chat_template: str | None = None
    """Jinja source; None if the model is no chat model."""
    temperature: float | None = None
    """The next four: defaults of the model's generation config; None if it says nothing."""
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    created: int = 0
    """Seconds since the epoch, for the models listing."""
    hidden_size: int = 0
    """Numbers in an embedding; 0: whoever wrote the card did not know."""
    constrained_decoding: bool = True
    """Answers can be held to a grammar, and to or from certain tokens, by all workers that wrote it."""


class AdapterRecord(Struct, frozen=True, tag=True, kw_only=True):
    """A LoRA adapter that the workers of a model are to have. Kept in the broker under its name."""

    name: str
    """In the API, beside the names of models."""
    model: str
    """Whose weights it changes."""
    path: str
    """Its folder, below the one that each worker allows; empty: only workers that were started with it can load it."""
    digest: str = ""
    """As in `LoadedAdapter`; empty until a worker has loaded it. Nothing else is served under this name."""
    created: int = 0
    """Seconds since the epoch."""


class Telemetry(Struct, frozen=True, tag=True, kw_only=True):
    """A service's figures at one moment."""

    service: str
    id: str
    state: str
    model: str = ""
    gauges: dict[str, float] = {}
    """Instrument name -> value; names and units in `telemetry.py`."""


class WaitingGroup(Struct, frozen=True, array_like=True):
    """Neighbours among one router's requests that have no token yet, next to each other in rank and flow."""

    rank: int
    """Lower ones are served first (lanes, classes)."""
    last_sequence: int
    """Highest stream sequence among them."""
    num_requests: int
    num_choices: int
    prompt_tokens: int
    """Over all of them; each prompt once."""
    output_tokens: int
    """Expected, over all choices."""
    flow: str = ""
    """Within a rank, flows share by weight; each is served in the order of the stream."""
    weight: float = 1.0


class RunningGroup(Struct, frozen=True, array_like=True):
    """Some of one router's choices that have begun."""

    num_choices: int
    tokens_left: int
    """Expected of each."""


class RouterLoad(Struct, frozen=True, tag=True, kw_only=True):
    """All that one router has in the queue and on the workers, of one model. Only routers know what waits in the
    stream: from everybody's loads each derives positions and waits."""

    router: RouterId
    model: str
    waiting: tuple[WaitingGroup, ...] = ()
    running: tuple[RunningGroup, ...] = ()
    promises: bytes = b""
    """New promises to clients that were refused: a digest of 8 bytes and tenths of a second, 16 bits, for each."""
    newest_sequence: int = 0
    """Highest stream sequence, of any model, that the router knew when it said this."""
    kept_promises: bytes = b""
    """Digests of promises to clients that have come back."""
