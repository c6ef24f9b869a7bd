"""Histories of a fleet: random events that the model fleet plays."""

from headrace_scheduler.decisions import LossCause, SchedulerConfig, WorkerFacts
from headrace_shared.messages import CancelReason, Lane, Request
from tests.scheduler.builders import request
from tests.scheduler.model_fleet import Link, ModelFleet, QueuedMessage

MAX_REQUESTS = 12


class History:
    """Reads numbers off a string of bytes; nothing but zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_over(self) -> bool:
        return self._position >= len(self._data)

    def pick(self, num_cases: int) -> int:
        if self.is_over:
            return 0
        self._position += 1
        return self._data[self._position - 1] % num_cases


def make_fleet(history: History) -> ModelFleet:
    block_size = (2, 4, 3, 1)[history.pick(4)]
    num_blocks = (12, 6, 8, 10, 16, 40)[history.pick(6)]
    config = SchedulerConfig(
        horizon_blocks=(1, 2, 3)[history.pick(3)], prefix_caching=history.pick(4) != 3, max_losses=1_000_000
    )
    facts = WorkerFacts(
        num_blocks=num_blocks,
        block_size=block_size,
        context=num_blocks * block_size,
        max_sequences=(8, 2, 3)[history.pick(3)],
        tokens_per_iteration=(8, 3, 64)[history.pick(3)],
    )
    smaller = facts._replace(num_blocks=num_blocks - 2, context=(num_blocks - 2) * block_size)
    fleet = ModelFleet(config, [facts, smaller if history.pick(2) else facts], depth=1 + history.pick(2))
    for _ in range(1 + history.pick(2)):
        fleet.start_worker()
    for _ in range(history.pick(6)):
        fleet.send(make_request(history, fleet))
    return fleet


def play_event(history: History, fleet: ModelFleet, *, calm: bool) -> None:
    event = history.pick(26 if calm else 34)
    link = pick_link(history, fleet)
    if event < 4:
        if len(fleet.messages) < MAX_REQUESTS:
            fleet.send(make_request(history, fleet))
    elif event < 8:
        fleet.schedule()
    elif event < 11:
        for _ in range(1 + history.pick(6)):
            fleet.turn()
    elif event < 24 and link is not None:
        ordinary = (fleet.deliver_grant, fleet.iterate, fleet.report, fleet.deliver_report)
        ordinary[event % 4](link)
    elif event < 26:
        message = pick_message(history, fleet)
        if message is not None:
            num_choices = message.request.num_choices
            choice = history.pick(num_choices) if history.pick(2) else None
            reasons = (CancelReason.CLIENT, CancelReason.STOP, CancelReason.DEADLINE)
            fleet.cancel(message, choice, reasons[history.pick(3)])
    else:
        play_fault(event, history, fleet, link)


def make_request(history: History, fleet: ModelFleet) -> Request:
    """Prompts start alike; some go on from an earlier answer, as in a conversation."""
    number = len(fleet.messages)
    prompt = [0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 2][: 1 + history.pick(10)]
    prompt += [history.pick(3) for _ in range(history.pick(3))]
    if number and history.pick(3) == 2:
        earlier = list(fleet.messages.values())[history.pick(number)]
        prompt += earlier.choices[0].shown
    return request(
        name=f"request-{number}",
        prompt=prompt,
        max_tokens=(8, 1, 2, 4, 12, 16)[history.pick(6)],
        num_choices=(1, 2, 3, 1)[history.pick(4)],
        salt=("", "", "other")[history.pick(3)],
        seed=history.pick(64),
        tenant=("", "a", "b")[history.pick(3)],
        priority=(0, 0, 1, -1)[history.pick(4)],
        lane=Lane.BATCH if history.pick(5) == 4 else Lane.INTERACTIVE,
    )


def pick_link(history: History, fleet: ModelFleet) -> Link | None:
    links = list(fleet.links.values())
    return links[history.pick(len(links))] if links else None


def pick_message(history: History, fleet: ModelFleet) -> QueuedMessage | None:
    messages = list(fleet.messages.values())
    return messages[history.pick(len(messages))] if messages else None


def play_fault(event: int, history: History, fleet: ModelFleet, link: Link | None) -> None:
    if event == 26 and len(fleet.links) < 3:
        fleet.start_worker()
    elif event == 27:
        message = pick_message(history, fleet)
        if message is not None:
            fleet.deliver(message)
    elif event == 28:
        fleet.replace_scheduler()
        for other in list(fleet.links.values()):
            if history.pick(3):
                fleet.adopt(other)
    elif link is None:
        return
    elif event == 29:
        (fleet.lose_grant, fleet.adopt)[history.pick(2)](link)
    elif event == 30:
        fleet.set_accepting(link, history.pick(2) == 1)
    elif event > 31:
        fleet.drain(link)
    elif event == 31:
        if history.pick(2):
            fleet.kill_worker(link, list(LossCause)[history.pick(3)])
        else:
            fleet.cut_off(link, too_long=history.pick(2) == 1)
