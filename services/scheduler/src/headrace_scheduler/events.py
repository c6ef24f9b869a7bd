"""What may happen to the core, as data: so that it can be written down, and happen again.

Methods of the core that change it are marked as `event`; an observer hears of each call before it is made, and of each
scheduling pass after it. Arguments are plain data, described by the methods' own annotations, so that what was written
down is decoded and checked by the same types.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from headrace_scheduler.decisions import Decisions

P = ParamSpec("P")
T = TypeVar("T")


class Observer(Protocol):
    def on_event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """The core's method `name` is about to be called; `arguments` holds all of them, in the order of the signature,
        except defaults at the end. They must not be kept: some are changed later."""
        ...

    def on_pass(self, now: float, decisions: Decisions) -> None:
        """`schedule(now)` returns `decisions`."""
        ...


class Observed(Protocol):
    observer: Observer | None


O = TypeVar("O", bound=Observed)  # noqa: E741  # the object


def event(method: Callable[Concatenate[O, P], T]) -> Callable[Concatenate[O, P], T]:
    """Marks a method of the core whose every call changes it."""
    name = method.__name__
    signature = inspect.signature(method)

    @wraps(method)
    def observed(self: O, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.observer is not None:
            arguments: tuple[Any, ...] = args
            if kwargs:
                bound = signature.bind(self, *args, **kwargs)
                bound.apply_defaults()  # else what follows a default would be left out
                arguments = bound.args[1:]
            self.observer.on_event(name, arguments)
        return method(self, *args, **kwargs)

    observed.is_event = True  # type: ignore[attr-defined]  # a mark for `event_names`
    return cast("Callable[Concatenate[O, P], T]", observed)


def event_names(kind: type) -> frozenset[str]:
    return frozenset(name for name, value in vars(kind).items() if hasattr(value, "is_event"))


@lru_cache(maxsize=64)
def time_argument(method: Callable[..., Any]) -> int | None:
    """Where among the arguments the time of the event stands."""
    names = list(inspect.signature(method).parameters)[1:]
    return names.index("now") if "now" in names else None


@lru_cache(maxsize=256)
def argument_types(method: Callable[..., Any], count: int) -> Any:
    """The type of the tuple of a method's first `count` arguments."""
    hints = get_type_hints(inspect.unwrap(method))
    names = list(inspect.signature(method).parameters)[1 : count + 1]
    return tuple[tuple(hints[name] for name in names)]  # type: ignore[misc]  # made at run time
