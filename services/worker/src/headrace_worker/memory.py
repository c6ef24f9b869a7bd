"""How much memory a device has to use, so that too little is said at the start and not by the kernel's killer."""

import torch

from headrace_shared.machine import available_memory


def available_bytes(device: torch.device) -> int | None:
    """What this process may still allocate. None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory()
