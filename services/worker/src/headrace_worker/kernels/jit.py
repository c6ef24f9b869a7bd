"""`triton.jit` with types: triton has none, and an untyped decorator would switch off the checks around it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, overload

import triton


class Kernel(Protocol):
    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """The kernel, to be launched by calling it, over `grid` programs."""
        ...

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        """Inlines it into the kernel that calls it."""
        ...


@overload
def jit(function: Callable[..., Any]) -> Kernel: ...


@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Kernel]: ...


def jit(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """A function in Triton's language. `do_not_specialize`: integers whose value must not cause a new compilation."""

    def decorate(function: Callable[..., Any]) -> Kernel:
        return cast(Kernel, triton.jit(function, do_not_specialize=list(do_not_specialize)))

    return decorate if function is None else decorate(function)
