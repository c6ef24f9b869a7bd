"""What the engine needs of an asynchronous device beside tensors: staging memory, marks in its queue, recorded work.

Two implementations: CUDA, and the host itself, where everything has happened by the time a call returns. On the host
the same engine runs in tests without a GPU, with its kernels interpreted.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace_worker.cuda.sizing import DeviceMemory


class Mark(Protocol):
    """A place in the device's queue."""

    def wait(self) -> None:
        """Returns when the device has come by."""
        ...


class Device(Protocol):
    @property
    def torch_device(self) -> torch.device: ...

    @property
    def compiles(self) -> bool:
        """Work that is done for the first time takes much longer than afterwards."""
        ...

    def staging(self, num_words: int) -> Tensor:
        """Host memory, int32 [num_words], that copies to and from the device use without anybody waiting. It may be
        dropped at once: it is used again only when those copies are done."""
        ...

    def mark(self) -> Mark: ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Does `work`, then returns what repeats it on the same memory at the cost of one launch. `work`
        must be the same sequence of device operations each time, and wait for nothing. All records share one pool of
        intermediate memory, so the largest should come first and results must be written to memory made before."""
        ...

    def memory(self) -> DeviceMemory: ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Memory that `work` takes at most on top of what is allocated before it."""
        ...


class CudaDevice:
    compiles = True

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all records: the allocator keeps memory for each stream that it has seen.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def staging(self, num_words: int) -> Tensor:
        # The allocator of pinned memory keeps a piece back until the copies that were queued on it are done.
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def mark(self) -> Mark:
        return _CudaMark()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        # Kernels are compiled and libraries initialized outside the capture, on a stream of their own as in it.
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            work()
        replay: Callable[[], None] = graph.replay
        replay()
        return replay

    def memory(self) -> DeviceMemory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(int(total), int(free), int(torch.cuda.memory_reserved(self._device)))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


class _CudaMark:
    def __init__(self) -> None:
        # Sleeping instead of spinning: the next iteration is queued already, so a late wake-up costs the device
        # nothing, and the thread that reads grants gets the core.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class HostDevice:
    """The CPU in the role of the device."""

    compiles = False

    def __init__(self, memory: DeviceMemory | None = None, peak_bytes: int = 0) -> None:
        """What `memory` and `peak_bytes` are to say, since nobody else does."""
        self._memory = memory or DeviceMemory(total=1 << 30, free=1 << 30, own=0)
        self._peak_bytes = peak_bytes

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def staging(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def mark(self) -> Mark:
        return _Past()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    def memory(self) -> DeviceMemory:
        return self._memory

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return self._peak_bytes


class _Past:
    def wait(self) -> None:
        return None
