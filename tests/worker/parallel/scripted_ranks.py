"""The scripted engine as one of several ranks: `python -m tests.worker.parallel.scripted_ranks FD`."""

import sys

from headrace_shared.messages import Admission
from headrace_worker.config import EngineConfig
from headrace_worker.engine_process import run
from headrace_worker.iteration import Report
from tests import scripted_engine
from tests.scripted_engine import ScriptedEngine, ScriptedSequence

RAISE_ON_RANK_1 = 4090
"""[RAISE_ON_RANK_1, k]: rank 1 raises at output index k."""


class _FailingSequence(ScriptedSequence):
    def mishap(self, index: int) -> str | None:
        if self.prompt == [RAISE_ON_RANK_1, index]:
            raise RuntimeError("scripted failure")
        return super().mishap(index)


class _FailingEngine(ScriptedEngine):
    def make_sequence(self, admission: Admission) -> ScriptedSequence:
        return _FailingSequence(admission)


def load(config: EngineConfig, report: Report) -> ScriptedEngine:
    return scripted_engine.load(config, report, _FailingEngine if config.place.rank == 1 else ScriptedEngine)


if __name__ == "__main__":
    sys.exit(run(load, sys.argv[1:]))
