"""Brings the cache's memory in before it is written.

Nothing of it is in memory before its first use, and then the system clears each page while the kernels wait for it: in
an iteration in which prompts fill fresh blocks, that was half of the time and more. So what comes next is brought in
beside the iterations. No more than that: a worker that has little to do stays small.
"""

import threading

from torch import Tensor

from headrace_worker.huge_pages import HUGE_PAGE, bring_in

AHEAD_BYTES = 128 << 20
"""Of all layers, behind the last block that is in use."""


class PagesAhead:
    """`reach` and `forget` belong to one thread. The thread that brings memory in ends when it has caught up."""

    def __init__(self, pages: Tensor) -> None:
        """pages [layers, blocks, ...], in main memory."""
        self._pages = pages
        self._num_blocks = pages.shape[1]
        block_bytes = max(1, pages[:, 0].numel() * pages.element_size())
        self._step = max(1, HUGE_PAGE * pages.shape[0] // block_bytes)
        """Blocks of a piece: about one huge page of each layer."""
        self._ahead = -(-AHEAD_BYTES // block_bytes)
        self._lock = threading.Lock()
        self._piece = threading.Lock()
        """Held while a piece is brought in."""
        self._wanted = 0
        self._present = 0
        self._is_running = False

    def reach(self, block_id: int) -> None:
        """A block is in use. Blocks that were never used are handed out in the order of their numbers."""
        if block_id + self._ahead // 2 < self._wanted or self._wanted == self._num_blocks:
            return
        with self._lock:
            self._wanted = min(block_id + 1 + self._ahead, self._num_blocks)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="pages-ahead", daemon=True).start()

    def forget(self) -> None:
        """Nothing is in memory any more when the caller has given it up. Waits for the piece in progress."""
        with self._lock:
            self._wanted = 0
        with self._piece:
            self._present = 0

    def _run(self) -> None:
        while True:
            with self._piece:
                with self._lock:
                    first, end = self._present, min(self._present + self._step, self._wanted)
                    if first >= end:
                        self._is_running = False
                        return
                if all(bring_in(layer[first:end]) for layer in self._pages):
                    self._present = end
                else:
                    # The system cannot, or has none to give: then it comes as it is used.
                    self._present = self._num_blocks
