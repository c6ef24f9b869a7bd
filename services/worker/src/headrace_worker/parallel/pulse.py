"""Signs of life of a rank: what its main thread is doing, told to the supervisor twice a second by a thread of its own.

A rank that is stopped or starved tells nothing; one whose main thread hangs tells that it does not get on.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace_worker.engine_frames import Beat

BEAT_S = 0.5


class Pulse:
    """`begin` and `end` belong to one thread: as long as something has not ended, the rank is busy with it."""

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self._send = send
        self._device_bytes: Callable[[], int] | None = None
        """Also tells that the model is loaded."""
        self._num_begun = 0
        self._num_ended = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def serve(self, device: str) -> None:
        """The model is loaded, to `device`."""
        self._device_bytes = _cuda_bytes(device) if device.startswith("cuda") else lambda: 0
        self._beat()  # from now on a silent rank is given up sooner

    def begin(self) -> None:
        """Something was begun that is to end soon."""
        self._num_begun += 1

    def end(self) -> None:
        """It has ended."""
        self._num_ended += 1

    def _run(self) -> None:
        while True:
            self._beat()
            time.sleep(BEAT_S)

    def _beat(self) -> None:
        num_ended, device_bytes = self._num_ended, self._device_bytes
        self._send(
            Beat(
                is_serving=device_bytes is not None,
                is_busy=self._num_begun > num_ended,
                num_steps=num_ended,
                memory_bytes=_resident_bytes(),
                device_bytes=device_bytes() if device_bytes is not None else 0,
            )
        )


def _resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _cuda_bytes(device: str) -> Callable[[], int]:
    import torch  # the engine of a GPU has long imported it; one without torch has none

    return lambda: torch.cuda.memory_reserved(device)
