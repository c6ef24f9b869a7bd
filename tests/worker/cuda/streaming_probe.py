"""A process that loads a checkpoint onto a device without memory, and prints how far its own memory grew after the
first layer, and how many bytes were read.

python -m tests.worker.cuda.streaming_probe FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.weights import TensorSource


class Touched:
    """Reads every byte of what it hands out, as a copy to a device does."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        part = self._source.read(name, rows, columns)
        part.sum()
        self.num_bytes += part.nbytes
        return part


def peak_bytes() -> int:
    """The most memory that this process has had, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no VmHWM")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.ones(1 << 16).sum()
    checkpoint = open_checkpoint(folder)
    source = Touched(checkpoint.source)
    peaks: list[int] = []
    read_decoder(
        checkpoint.config,
        source,
        TorchPacking(folds_norms=False),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        report=lambda done, total: peaks.append(peak_bytes()),
    )
    # The first layer brings in what torch loads for its first use of the device.
    sys.stdout.write(f"{peak_bytes() - peaks[1]} {source.num_bytes}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
