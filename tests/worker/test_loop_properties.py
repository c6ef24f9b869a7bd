"""Random histories of the loop against an oracle: whatever comes when, each sequence gets the script's tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_shared.messages import BlockId, Extension, FinishReason, SequenceId
from headrace_worker.loop import IterationLoop
from tests.scripted_engine import ECHO, ScriptedEngine, expected_output
from tests.worker.loop_builders import Collected, admission, run_until_idle

BLOCK_SIZE = 4
NUM_BLOCKS = 48
CONTEXT = 40


@settings(max_examples=150, deadline=None)
@given(data=st.data(), looks_ahead=st.booleans(), num_stages=st.integers(1, 4), max_drafts=st.sampled_from([0, 1, 4]))
def test_random_histories(data: st.DataObject, looks_ahead: bool, num_stages: int, max_drafts: int) -> None:
    engine = ScriptedEngine(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        context=CONTEXT,
        max_sequences=data.draw(st.integers(1, 5)),
        tokens_per_iteration=data.draw(st.integers(5, 24)),
        looks_ahead=looks_ahead,
        num_stages=num_stages,
        max_drafts=max_drafts,
    )
    loop = IterationLoop(engine)
    world = _World(loop)
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["admit", "extend", "release", "step", "step", "step"]))
        if action == "admit":
            world.admit(data)
        elif action == "extend" and world.running:
            world.extend(data.draw(st.sampled_from(sorted(world.running))), data.draw(st.integers(1, 3)))
        elif action == "release" and world.running:
            world.release(data.draw(st.sampled_from(sorted(world.running))))
        elif action == "step":
            world.step()
    world.finish()
    assert engine.num_sequences == 0 and loop.num_sequences == 0


class _World:
    """A scheduler that grants blocks carelessly, but never the same one twice before its release is confirmed."""

    def __init__(self, loop: IterationLoop) -> None:
        self.loop = loop
        self.collected = Collected()
        self.free = list(range(NUM_BLOCKS))
        self.held: dict[int, list[int]] = {}
        self.running: set[int] = set()
        self.stopped: set[int] = set()
        self.expected: dict[int, tuple[list[int], FinishReason]] = {}
        self.next_id = 1

    def admit(self, data: st.DataObject) -> None:
        number, self.next_id = self.next_id, self.next_id + 1
        numbers = st.integers(0, data.draw(st.sampled_from([3, 3000])))
        prompt = data.draw(st.lists(numbers, min_size=1, max_size=CONTEXT - 1))
        if len(prompt) > 1 and data.draw(st.booleans()):
            prompt[0] = ECHO  # what follows can be guessed
        max_tokens = data.draw(st.integers(1, 30))
        whole = expected_output(prompt, number, 0, max_tokens)[: CONTEXT - len(prompt)]
        done = data.draw(st.integers(0, len(whole) - 1))
        stop = data.draw(st.one_of(st.none(), st.integers(done, len(whole) - 1)))
        num_blocks = -(-(len(prompt) + done) // BLOCK_SIZE) + data.draw(st.integers(0, 1))
        if num_blocks > len(self.free):
            return
        self.held[number] = [self.free.pop() for _ in range(num_blocks)]
        stop_ids = () if stop is None else (whole[stop],)
        end = next((index + 1 for index in range(done, len(whole)) if whole[index] in stop_ids), len(whole))
        self.expected[number] = (
            whole[done:end],
            FinishReason.STOP if whole[end - 1] in stop_ids else FinishReason.LENGTH,
        )
        self.running.add(number)
        self.loop.admit(
            admission(
                number,
                prompt,
                self.held[number],
                max_tokens=max_tokens,
                stop_token_ids=stop_ids,
                output=whole[:done],
                seed=number,
                min_tokens=done,
            )
        )

    def extend(self, number: int, num_blocks: int) -> None:
        blocks = [self.free.pop() for _ in range(min(num_blocks, len(self.free)))]
        self.held[number] += blocks
        self.loop.extend(Extension(SequenceId(number), tuple(BlockId(block) for block in blocks)))

    def release(self, number: int) -> None:
        self.running.discard(number)
        self.stopped.add(number)
        self.loop.release(SequenceId(number))

    def step(self) -> bool:
        step = self.loop.step()
        if step is None:
            return False
        self.collected.add(step)
        for result in step.sequences:
            assert result.error is None, result
            if result.finish is not None:
                self.running.discard(int(result.sequence_id))
        for released in step.released:
            self.free += self.held.pop(int(released))
        return True

    def finish(self) -> None:
        """Lets the stalled ones go on, one after the other; then everything must be over."""
        while True:
            while self.step():
                pass
            if not self.running:
                break
            number = min(self.running)
            if not self.free:
                self.release(max(self.running))
            else:
                self.extend(number, 3)
        run_until_idle(self.loop, self.collected)
        assert sorted(self.free) == list(range(NUM_BLOCKS))
        for number, (tokens, finish) in self.expected.items():
            got = self.collected.tokens.get(number, [])
            if number in self.stopped and number not in self.collected.finish:
                assert got == tokens[: len(got)]
            else:
                assert (got, self.collected.finish[number]) == (tokens, finish)
