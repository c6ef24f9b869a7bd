"""Downloads a checkpoint from a model hub, and tells how far it is."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_shared.errors import ConfigError

FILES = ["*.safetensors", "*.json", "*.jinja"]
REPORT_S = 0.25

Report = Callable[[int, int], None]
"""Bytes done, bytes in all as far as known."""


def download(repository: str, report: Report) -> Path:
    """The folder of the checkpoint. `report` is called from several threads, one at a time. Raises ConfigError with one
    line."""
    from huggingface_hub import snapshot_download  # Only hub ids need it.

    try:
        return Path(snapshot_download(repository, allow_patterns=FILES, tqdm_class=_bars(report)))
    except Exception as error:  # Dozens of kinds, from name resolution to access rights: one line for the user.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError("model", f"cannot get {repository} from the hub: {reason}") from error


def _bars(report: Report) -> type[Any]:
    """What the library takes for a progress bar; it draws nothing."""
    from huggingface_hub.utils import tqdm

    lock = threading.Lock()
    reported_at = 0.0

    class Bar(tqdm):  # type: ignore[misc]  # the library has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self._counts_bytes = kwargs.get("unit") == "B"
            self._num_done = 0

        def update(self, count: float | None = 1) -> None:
            nonlocal reported_at
            with lock:
                self._num_done += int(count or 0)
                now = time.monotonic()
                if self._counts_bytes and now - reported_at >= REPORT_S:
                    reported_at = now
                    report(self._num_done, max(self._num_done, int(self.total or 0)))

    return Bar
