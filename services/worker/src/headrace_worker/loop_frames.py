"""Frames into an iteration loop, and what it brings about as a frame. The same for every engine."""

from headrace_shared.messages import Grant
from headrace_worker.engine_frames import DropAdapter, Iteration, Reset, Rest, ToEngine
from headrace_worker.loop import IterationLoop, StepResult


def apply_frame(frame: ToEngine, loop: IterationLoop, generation: int) -> int:
    """Does what a frame says, in the order admissions, extensions, releases. Returns the generation from now on."""
    if isinstance(frame, Grant):
        for admission in frame.admissions:
            loop.admit(admission)
        for extension in frame.extensions:
            loop.extend(extension)
        for sequence_id in frame.releases:
            loop.release(sequence_id)
    elif isinstance(frame, Reset):
        loop.reset()
        generation = frame.generation
    elif isinstance(frame, Rest):
        loop.rest()
        generation = frame.generation
    elif isinstance(frame, DropAdapter) and loop.adapters is not None:
        loop.adapters.drop(frame.digest)
    return generation


def iteration_frame(result: StepResult, generation: int) -> Iteration:
    return Iteration(
        generation=generation,
        num_iterations=result.num_iterations,
        rows=tuple(result.sequences),
        released=tuple(result.released),
        num_prefill_tokens=result.num_prefill_tokens,
        elapsed_s=result.elapsed_s,
    )
