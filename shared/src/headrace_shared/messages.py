"""Every message that crosses a process boundary, and the ids in it. Data only.

Here is what concerns a request; what services say of themselves is in `fleet_messages.py`, what is kept or told
afterwards in `record_messages.py`.

The services meet nowhere else. All messages are frozen, tagged with their class name, and made of
primitives, so that they mean the same in every process and version; a new field always has a default.

Who says what to whom (subjects in `subjects.py`):

    router    -> queue      Request         the durable work
    router    -> scheduler  Cancel          (all schedulers hear it; a tombstone of it stays a while), Attached
    scheduler -> worker     Adopt, Grant    credit: admit, extend, release; fenced by the lease epoch
    worker    -> scheduler  Snapshot        all that the worker holds, in answer to Adopt
    worker    -> scheduler  Progress        what was computed and which blocks came back
    worker    -> everyone   Hello           what the worker is and in which state
    anyone    -> worker     WorkerCommand   drain, park or promote it: autoscaler and operator
    worker    -> whoever    CommandReply    whether it obeys, and why not
    scheduler -> worker     DrainVerdict    whether it may leave: fenced by the lease epoch, like Grant
    worker    -> router     TokenFrame      tokens of one choice, through the token log
    scheduler -> router     RequestEnded    the one terminal event, through the token log
    scheduler -> operator   DeadRequest     what was given up because workers die of it, in a stream of its own
    scheduler -> scheduler  LossRecord      how often a request has lost its worker, in a bucket
    router    -> router     RouterLoad      which of its requests wait and run, four times a second
    router    -> scheduler  StoryQuery      what became of a request, for a person who looks at it
    scheduler -> router     Story
    anyone    -> everyone   Telemetry       figures, once a second

Token ids travel packed, as unsigned 32-bit little-endian (`codec.pack_ids`).
"""

from enum import StrEnum
from typing import NewType

from msgspec import Struct

RequestId = NewType("RequestId", str)
"""128 random bits as 32 hex digits, made by the router; never chosen by a client."""
RouterId = NewType("RouterId", str)
SchedulerId = NewType("SchedulerId", str)
WorkerId = NewType("WorkerId", str)
"""Service ids are unique for each start of a process, so that a restarted one is somebody new."""
SequenceId = NewType("SequenceId", int)
"""One stay of one choice on one worker. Never used twice on a worker: a preempted choice returns under a new one."""
BlockId = NewType("BlockId", int)
"""Index of a KV block in a worker's cache, 0 <= id < num_blocks."""
TokenId = NewType("TokenId", int)


class Lane(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class FinishReason(StrEnum):
    """Why one choice ended."""

    STOP = "stop"
    """A stop token was sampled (it is the frame's last token and not part of the text), or a stop string was met."""
    LENGTH = "length"
    """max_tokens were generated."""


class Outcome(StrEnum):
    """How a request ended. Each accepted request has exactly one."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SHED = "shed"
    FAILED = "failed"


class CancelReason(StrEnum):
    CLIENT = "client"
    """The client went away or asked for it: the outcome is `cancelled`."""
    STOP = "stop"
    """The router met a stop string: the choice is complete, the outcome stays `finished`."""
    DEADLINE = "deadline"
    """The request's time is up: the outcome is `expired`."""
    SHED = "shed"
    """It still waits, and its time will surely be up before its turn: the outcome is `shed`."""


class Audience(StrEnum):
    """Without whom schedulers cancel a request: nobody, the router that queued it, any router that has its client."""

    NONE = "none"
    ROUTER = "router"
    ATTACHED = "attached"


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How the next token is drawn. Ranges are checked by the router; nothing inside checks again."""

    seed: int
    """0 <= seed < 2**63. The router draws one when the client gave none, so that any worker can go on."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (Holtzman et al., 2020)."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) the logits of tokens seen in prompt or output (Keskar et al., 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output for each time they were seen."""
    logit_bias: dict[int, float] = {}
    """token id -> added to its logit."""
    num_logprobs: int | None = None
    """None: no log-probabilities; n: the sampled token's and those of the n likeliest."""
    grammar: str = ""
    """Only tokens that it allows are drawn; see `grammars.py`. Empty: all are allowed."""
    num_prompt_logprobs: int | None = None
    """As `num_logprobs`, of each token of the prompt but the first. Choice 0 tells them for all choices."""
    allowed_token_ids: bytes = b""
    """Packed: only these are drawn. Empty: all are allowed. Like `bad_words` not together with a grammar."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, none empty, that are never in the output."""
    logprob_token_ids: tuple[int, ...] = ()
    """Where log-probabilities are wanted: of these tokens, instead of the likeliest."""


class StopParams(Struct, frozen=True, kw_only=True):
    """What ends a choice on the worker. Stop strings are the router's business."""

    max_tokens: int
    """At least 1. prompt + max_tokens never exceeds the model's context."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids (unless they are to be ignored) and the client's own."""


class Request(Struct, frozen=True, tag=True, kw_only=True):
    """One unit of work in the durable queue: one prompt, `num_choices` answers."""

    request_id: RequestId
    router: RouterId
    model: str
    prompt: bytes
    """Packed token ids, at least one."""
    sampling: SamplingParams
    stop: StopParams
    num_choices: int = 1
    lane: Lane = Lane.INTERACTIVE
    tenant: str = ""
    cache_salt: str = ""
    """Mixed into the root of the block hashes: only requests with the same salt share cached blocks."""
    trace: dict[str, str] = {}
    """W3C trace context. In the body, since some broker versions rename the header."""
    audience: Audience = Audience.NONE
    timeout_s: float = 0.0
    """The request is of no use any more so long after it was stored in the queue; 0: no limit."""
    priority: int = 0
    """Class within the interactive lane: higher ones go first, and take places from lower ones."""
    weight: float = 1.0
    """The tenant's share of the workers, relative to other tenants of the same class."""
    adapter: str = ""
    """Name of the LoRA adapter of `model` that is asked for; empty: the model itself."""
    adapter_digest: str = ""
    """Of its content (`LoadedAdapter.digest`): only workers that have just this run the request, and only requests with
    the same share cached blocks."""
    embeds: bool = False
    """What is wanted is the mean of the prompt's last hidden states: it comes with the only token."""


class Cancel(Struct, frozen=True, tag=True, kw_only=True):
    request_id: RequestId
    choice: int | None = None
    """None: the whole request."""
    reason: CancelReason = CancelReason.CLIENT


class Attached(Struct, frozen=True, tag=True, kw_only=True):
    request_ids: tuple[RequestId, ...]


class Admission(Struct, frozen=True, tag=True, kw_only=True):
    """Start one sequence. Also all that a successor needs to carry it on: it comes back in a Snapshot."""

    sequence_id: SequenceId
    request: Request
    choice: int
    attempt: int
    """Rises each time the choice is placed anew. Routers drop frames of lower attempts."""
    block_ids: tuple[BlockId, ...]
    """Block i holds the keys and values of positions [i * block_size, (i + 1) * block_size)."""
    output: bytes = b""
    """Packed token ids generated in earlier attempts; they are computed again but not published again."""
    num_cached: int = 0
    """The first positions whose keys and values are already in the blocks (after `copies`); at least one is left."""
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """(source, destination): copied whole before the sequence runs: copy-on-write of a shared, partly filled block."""
    ack_subject: str = ""
    """Acknowledges the queue message; the owner of the request uses it after the terminal event."""
    stream_sequence: int = 0
    """Of the queue message."""
    num_losses: int = 0
    """Workers that the request has lost before this admission."""
    suspicion: int = 0
    """How much those losses speak against the request itself (`LossRecord`)."""
    rank: int = 0
    """Whose prompt is computed first: the lower one's, and of equal ones that of the earlier admission."""


class Extension(Struct, frozen=True, array_like=True):
    """More blocks for a running sequence, appended to its block table."""

    sequence_id: SequenceId
    block_ids: tuple[BlockId, ...]


class Adopt(Struct, frozen=True, tag=True, kw_only=True):
    """The new holder of the worker's lease introduces itself and wants a Snapshot. Grants start again at number 1."""

    worker: WorkerId
    scheduler: SchedulerId
    epoch: int


class Grant(Struct, frozen=True, tag=True, kw_only=True):
    """Credit for one worker. Applied in the order admissions, extensions, releases; an empty one is a heartbeat."""

    worker: WorkerId
    epoch: int
    number: int
    """1, 2, 3 … within the epoch. A worker that misses one applies no later one and asks for a resync."""
    progress_seen: int
    """The scheduler has applied all progress up to this number: the worker may forget what it reported there."""
    admissions: tuple[Admission, ...] = ()
    extensions: tuple[Extension, ...] = ()
    releases: tuple[SequenceId, ...] = ()
    """Stop these sequences (cancelled or preempted). Unknown ids are no error: they may have just finished."""


GRAMMAR_FAILED = "grammar: "
"""A sequence's `error` begins so where it was its grammar that could not be followed any further."""


class SequenceProgress(Struct, frozen=True, array_like=True):
    sequence_id: SequenceId
    num_computed: int
    """Positions whose keys and values are written by finished iterations."""
    tokens: tuple[int, ...] = ()
    """Newly sampled token ids, in order."""
    finish: FinishReason | None = None
    """The sequence takes part in no further iteration. It still holds its blocks until it is `released`."""
    error: str | None = None
    """The sequence failed alone (its own parameters, say); like `finish`, it is over."""


class Progress(Struct, frozen=True, tag=True, kw_only=True):
    """What happened since the last one. Without sequences it is a heartbeat, sent at least every 500 ms."""

    worker: WorkerId
    epoch: int
    number: int
    """1, 2, 3 … within the epoch."""
    grant_seen: int
    """All grants up to this number are applied."""
    resync: bool = False
    """A grant is missing: adopt me again."""
    sequences: tuple[SequenceProgress, ...] = ()
    released: tuple[SequenceId, ...] = ()
    """No iteration, in flight ones included, will write these sequences' blocks again: they are free."""
    num_iterations: int = 0
    """Since the worker started. Stands still while running sequences hold blocks: the engine hangs."""
    num_prefill_tokens: int = 0
    """Computed for prompts since the last progress."""
    elapsed_s: float = 0.0
    """Time spent in iterations since the last progress."""


class SequenceSnapshot(Struct, frozen=True, kw_only=True):
    admission: Admission
    """`block_ids` is the block table of now, with all extensions."""
    tokens: bytes
    """Packed ids sampled since the admission."""
    num_computed: int
    finish: FinishReason | None = None
    error: str | None = None
    released: bool = False
    """Its blocks are free. Kept only until the scheduler has seen it."""


class Snapshot(Struct, frozen=True, tag=True, kw_only=True):
    """All sequences of a worker, in parts that fit a message. Progress numbers start again at 1 after it."""

    worker: WorkerId
    epoch: int
    part: int
    num_parts: int
    sequences: tuple[SequenceSnapshot, ...] = ()


class TopLogprob(Struct, frozen=True, array_like=True):
    token: int
    logprob: float


class TokenLogprobs(Struct, frozen=True, array_like=True):
    logprob: float
    """Of the token, natural logarithm, before temperature and filters."""
    top: tuple[TopLogprob, ...]
    """The likeliest tokens, or those that were asked for, likeliest first."""
    rank: int = 0
    """Of a prompt's token: 1 if none was likelier. 0: not told."""


class TokenFrame(Struct, frozen=True, tag=True, kw_only=True):
    """Tokens of one choice. `index` makes delivery idempotent: what came before is dropped, a missing one shows."""

    request_id: RequestId
    choice: int
    attempt: int
    index: int
    """Position of the first token in the choice's output, from 0. Below 0: these are the prompt's tokens, which end at
    -1, with the log-probabilities that were asked for."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As long as `tokens` where log-probabilities were asked for, else empty."""
    finish: FinishReason | None = None
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache at this attempt's admission."""
    embedding: bytes = b""
    """With the last token, where it was asked for: 32-bit floats, little-endian."""


class RequestEnded(Struct, frozen=True, tag=True, kw_only=True):
    """The last event of a request's token log. Its owner writes it, then acknowledges the queue message."""

    request_id: RequestId
    outcome: Outcome
    code: str = ""
    """An error code of `errors.py`, for outcomes other than finished and cancelled."""
    message: str = ""
    """For the user: no paths, subjects or stack traces."""


class DrainVerdict(Struct, frozen=True, tag=True, kw_only=True):
    """Said to a draining worker at once and about every second, for as long as it drains; the latest one counts."""

    worker: WorkerId
    epoch: int
    is_granted: bool
    """False: be ready again, nobody else could do the work that waits."""
    has_others: bool = False
    """Its sequences are moved to other workers; else it runs them to their end."""


ControlMessage = Adopt | Grant | DrainVerdict
"""On `grants.<worker>`."""
ReportMessage = Progress | Snapshot
"""On `progress.<scheduler>`."""
LogMessage = TokenFrame | RequestEnded
"""On `tokens.<router>.<request>`."""
