"""Requests, workers and progress with defaults, so that a test names only what it is about."""

from collections.abc import Sequence

from msgspec.structs import replace

from headrace_scheduler.decisions import Credit, Decisions, SchedulerConfig, WorkerFacts
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.codec import pack_ids
from headrace_shared.messages import (
    Admission,
    FinishReason,
    Lane,
    Progress,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    SequenceProgress,
    SequenceSnapshot,
    StopParams,
    WorkerId,
)

W1 = WorkerId("worker-1")
W2 = WorkerId("worker-2")
NOW = 0.0


def facts(
    num_blocks: int = 64,
    block_size: int = 16,
    context: int | None = None,
    max_sequences: int = 16,
    tokens_per_iteration: int = 256,
) -> WorkerFacts:
    context = num_blocks * block_size if context is None else context
    return WorkerFacts(num_blocks, block_size, context, max_sequences, tokens_per_iteration)


def request(
    name: str = "r1",
    prompt: Sequence[int] | int = 40,
    max_tokens: int = 20,
    num_choices: int = 1,
    salt: str = "",
    seed: int = 7,
    tenant: str = "",
    priority: int = 0,
    lane: Lane = Lane.INTERACTIVE,
    weight: float = 1.0,
    num_prompt_logprobs: int | None = None,
    adapter: str = "",
    embeds: bool = False,
) -> Request:
    """`prompt`: token ids, or how many. Prompts of different lengths share their beginnings. `adapter`: its name."""
    return Request(
        request_id=RequestId(name),
        router=RouterId("router-1"),
        model="m",
        prompt=pack_ids(range(100, 100 + prompt) if isinstance(prompt, int) else prompt),
        sampling=SamplingParams(seed=seed, num_prompt_logprobs=num_prompt_logprobs),
        stop=StopParams(max_tokens=max_tokens),
        num_choices=num_choices,
        cache_salt=salt,
        tenant=tenant,
        priority=priority,
        lane=lane,
        weight=weight,
        adapter=adapter,
        adapter_digest=adapter and f"digest of {adapter}",
        embeds=embeds,
    )


def scheduler(*workers: WorkerFacts, config: SchedulerConfig | None = None) -> Scheduler:
    """With empty workers named worker-1, worker-2 …"""
    made = Scheduler(config)
    for i, worker in enumerate(workers, start=1):
        made.add_worker(WorkerId(f"worker-{i}"), worker, (), NOW)
    return made


def add(made: Scheduler, *requests: Request) -> None:
    """Queue messages with rising stream sequences, delivered for the first time."""
    for wanted in requests:
        made.add_request(wanted, f"ack.{wanted.request_id}", 1, 1, NOW)


def step(made: Scheduler) -> Decisions:
    decisions = made.schedule(NOW)
    made.check_integrity()
    return decisions


def admissions(decisions: Decisions, worker: WorkerId = W1) -> list[Admission]:
    return decisions.credits.get(worker, Credit()).admissions


def admitted_names(decisions: Decisions, worker: WorkerId = W1) -> list[str]:
    return [admission.request.request_id for admission in admissions(decisions, worker)]


def advance(
    made: Scheduler,
    sequence_id: int,
    num_computed: int,
    *tokens: int,
    finish: FinishReason | None = None,
    error: str | None = None,
    worker: WorkerId = W1,
    released: bool = False,
) -> None:
    """Progress of one sequence."""
    report(
        made,
        SequenceProgress(SequenceId(sequence_id), num_computed, tokens, finish, error),
        worker=worker,
        released=(sequence_id,) if released else (),
    )


def report(made: Scheduler, *sequences: SequenceProgress, worker: WorkerId = W1, released: Sequence[int] = ()) -> None:
    progress = Progress(
        worker=worker,
        epoch=1,
        number=1,
        grant_seen=1,
        sequences=sequences,
        released=tuple(SequenceId(i) for i in released),
    )
    made.apply_progress(worker, progress, NOW)
    made.check_integrity()


def snapshot(
    admission: Admission,
    *tokens: int,
    num_computed: int = 40,
    finish: FinishReason | None = None,
    error: str | None = None,
    released: bool = False,
) -> SequenceSnapshot:
    return SequenceSnapshot(
        admission=replace(admission, copies=()),
        tokens=pack_ids(tokens),
        num_computed=num_computed,
        finish=finish,
        error=error,
        released=released,
    )
