"""One choice of an answer in the simulated world: its frames in the token log, and what the router makes of them."""

from dataclasses import dataclass, field

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.token_log import parse_log
from headrace_shared import codec
from headrace_shared.messages import Admission, FinishReason, SequenceId, TokenFrame


@dataclass
class ChoiceView:
    """One choice in the token log, and as the router shows it to the client."""

    choice: int
    frames: list[TokenFrame] = field(default_factory=list)
    """The log."""
    logged: dict[int, int] = field(default_factory=dict)
    """Tokens in the log, by index."""
    logged_finish: FinishReason | None = None
    seen_attempt: int = 0
    shown: list[int] = field(default_factory=list)
    shown_finish: FinishReason | None = None
    stays: dict[int, SequenceId] = field(default_factory=dict)
    """By attempt. Without a change of scheduler each stay has an attempt of its own."""

    def take(self, admission: Admission, index: int, tokens: list[int], finish: FinishReason | None) -> None:
        request_id, attempt = admission.request.request_id, admission.attempt
        for i, token in enumerate(tokens, start=index):
            assert self.logged.setdefault(i, token) == token, (request_id, i)
        self.frames.append(
            TokenFrame(
                request_id=request_id,
                choice=self.choice,
                attempt=attempt,
                index=index,
                tokens=tuple(tokens),
                finish=finish,
            )
        )
        self.logged_finish = self.logged_finish or finish
        end = index + len(tokens)
        has_news = end > len(self.shown) or (end == len(self.shown) and finish is not None)
        if self.shown_finish is not None or not has_news or attempt < self.seen_attempt:
            return
        self.seen_attempt = attempt
        while len(self.shown) < index:
            self.shown.append(self.logged[len(self.shown)])  # a gap, repaired from the log
        self.shown += tokens[len(self.shown) - index :]
        self.shown_finish = finish

    def repair(self) -> bool:
        """The request has ended: what the log has beyond what was shown is shown. False if there is nothing."""
        missing = [self.logged[i] for i in range(len(self.shown), len(self.logged))]
        self.shown += missing
        was_finished = self.shown_finish is not None
        self.shown_finish = self.shown_finish or self.logged_finish
        return bool(missing) or not was_finished

    def log(self) -> ChoiceLog:
        """As it is read. It must tell what the router has, no more and no less."""
        log = parse_log(codec.encode(frame) for frame in self.frames).choices[self.choice]
        assert (list(log.output), log.finish) == (self.shown, self.shown_finish), (log, self)
        return log

    def check_tail(self, known: ChoiceLog) -> None:
        """Who puts frames behind what is `known` must find the same, or hear that it takes the whole log."""
        found = parse_log((codec.encode(frame) for frame in self.frames), known={self.choice: known})
        if self.frames and not found.is_unsure:
            output, _, finish = found.choices[self.choice]
            is_same = (list(output[: len(self.shown)]), finish) == (self.shown, self.shown_finish)
            assert is_same, (known, found, self)
