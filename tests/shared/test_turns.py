"""Services do not take a core from who computes; what they start does neither, unless it computes itself."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies of Linux")

PROGRAM = """
import os, subprocess, sys
from headrace_shared.turns import give_way, keep_turn

def child():
    code = "import os; print(os.sched_getscheduler(0))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

chosen = int(sys.argv[1])
os.sched_setscheduler(0, chosen, os.sched_param(0))
give_way()
given = (os.sched_getscheduler(0), child())
keep_turn()
print(*given, os.sched_getscheduler(0), child())
"""


def policies(chosen: int) -> list[int]:
    """Of a process and its child after `give_way`, and after `keep_turn`."""
    command = [sys.executable, "-c", PROGRAM, str(chosen)]
    return [int(word) for word in subprocess.run(command, capture_output=True, check=True).stdout.split()]


def test_who_gives_way_does_so_with_all_that_it_starts_until_one_keeps_its_turn() -> None:
    batch, other = os.SCHED_BATCH, os.SCHED_OTHER
    assert policies(other) == [batch, batch, other, other]


def test_a_policy_that_somebody_has_chosen_stays() -> None:
    assert policies(os.SCHED_IDLE) == 4 * [os.SCHED_IDLE]
