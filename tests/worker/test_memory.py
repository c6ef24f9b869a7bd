"""What memory there is."""

import torch

from headrace_worker.memory import available_bytes


def test_this_machine_has_some_memory_and_not_all_of_it_is_free() -> None:
    available = available_bytes(torch.device("cpu"))
    assert available is not None
    with open("/proc/meminfo", encoding="ascii") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 1 << 20 < available < total
