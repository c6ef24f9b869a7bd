"""What the ranks of one pipeline stage exchange within a forward pass."""

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """Every rank of the stage calls the same functions in the same order with tensors of the same shape and type."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks. May reuse the memory of `values`."""
        ...

    def all_gather(self, values: Tensor) -> Tensor:
        """[rows, n] of each rank -> [rows, ranks * n], in the order of the ranks."""
        ...


class SingleRank:
    """A stage that is one rank: nothing to exchange."""

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        return values
