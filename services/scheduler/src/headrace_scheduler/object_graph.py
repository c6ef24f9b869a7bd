"""The core's whole state as bytes, and back: plain objects that refer to each other in any way.

Nothing but data is read: a class is named by its place in a given list, and made without calling any code of its own.
The list is that of the program that reads, so that states do not outlive a change of it (`fingerprint` tells).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import msgpack
import msgspec

from headrace_shared.errors import ProtocolError

_PLAIN = (type(None), bool, int, float, str, bytes)
_MADE_WHOLE = ("tuple", "named", "struct", "enum", "array")
"""Kinds that cannot be made first and filled later."""

# A graph is a list of nodes [kind, class, content]; the first is the root. A value within a content is plain, or a list
# of one number: the node it refers to.


class ObjectGraph:
    def __init__(self, classes: Iterable[type]) -> None:
        self._classes: Sequence[type] = tuple(classes)
        self._numbers = {kind: number for number, kind in enumerate(self._classes)}

    @property
    def fingerprint(self) -> str:
        """Differs if a class or its fields differ."""
        described = [(kind.__module__, kind.__qualname__, _fields(kind)) for kind in self._classes]
        return hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()

    def dump(self, root: object) -> bytes:
        """Raises TypeError for an object of a class that is not in the list."""
        objects = [root]
        numbers = {id(root): 0}
        nodes: list[list[Any]] = []

        def refer(value: object) -> Any:
            if type(value) in _PLAIN:
                return value
            number = numbers.get(id(value))
            if number is None:
                number = numbers[id(value)] = len(objects)
                objects.append(value)
            return [number]

        for value in objects:  # grows while it is walked
            nodes.append(self._node(value, refer))
        packed: bytes = msgpack.packb(nodes, use_bin_type=True)
        return packed

    def _node(self, value: Any, refer: Any) -> list[Any]:
        kind = type(value)
        if kind is list:
            return ["list", 0, [refer(item) for item in value]]
        if kind is tuple:
            return ["tuple", 0, [refer(item) for item in value]]
        if kind is dict or kind is OrderedDict:
            return ["dict" if kind is dict else "ordered", 0, [refer(item) for pair in value.items() for item in pair]]
        if kind is array:
            return ["array", 0, value.tobytes()] if value.typecode == "I" else _refuse(value)
        number = self._numbers.get(kind)
        if number is None:
            _refuse(value)
        if isinstance(value, Enum):
            return ["enum", number, value.name]
        if isinstance(value, tuple):
            return ["named", number, [refer(item) for item in value]]
        if isinstance(value, msgspec.Struct):
            return ["struct", number, [refer(getattr(value, field)) for field in value.__struct_fields__]]
        return ["object", number, [refer(getattr(value, field)) for field in _fields(kind)]]

    def load(self, data: bytes) -> Any:
        """The root. Raises ProtocolError for anything that `dump` cannot have written."""
        try:
            nodes = msgpack.unpackb(data, raw=False, max_ext_len=0)
            return _Loader(nodes, self._classes).root()
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"no readable state: {error!r}") from error


class _Loader:
    def __init__(self, nodes: list[list[Any]], classes: Sequence[type]) -> None:
        self._nodes = nodes
        self._classes = classes
        self._made: dict[int, Any] = {}
        self._empty: list[int] = []

    def root(self) -> Any:
        root = self._make(0)
        while self._empty:
            self._fill(self._empty.pop())
        return root

    def _value(self, reference: Any) -> Any:
        if isinstance(reference, list):
            (number,) = reference
            return self._make(number)
        return reference

    def _make(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        kind, class_number, content = self._nodes[number]
        made: Any
        if kind in _MADE_WHOLE:
            made = self._made_whole(kind, class_number, content)
        else:
            self._empty.append(number)
            containers: dict[str, Any] = {"list": list, "dict": dict, "ordered": OrderedDict}
            made = object.__new__(self._classes[class_number]) if kind == "object" else containers[kind]()
        self._made[number] = made
        return made

    def _made_whole(self, kind: str, class_number: int, content: Any) -> Any:
        if kind == "array":
            words = array("I")
            words.frombytes(content)
            return words
        if kind == "enum":
            members: Any = self._classes[class_number]
            return members[content]
        values = [self._value(item) for item in content]
        if kind == "tuple":
            return tuple(values)
        named: Any = self._classes[class_number]
        if kind == "named":
            return named._make(values)
        return named(**dict(zip(named.__struct_fields__, values, strict=True)))

    def _fill(self, number: int) -> None:
        kind, _, content = self._nodes[number]
        made = self._made[number]
        values = [self._value(item) for item in content]
        if kind == "list":
            made.extend(values)
        elif kind == "object":
            for field, value in zip(_fields(type(made)), values, strict=True):
                object.__setattr__(made, field, value)
        else:
            made.update(zip(values[::2], values[1::2], strict=True))


def _fields(kind: type) -> tuple[str, ...]:
    """Every attribute of the class's instances: slots, or the annotations of a class without any."""
    if issubclass(kind, Enum):
        return tuple(kind.__members__)
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if issubclass(kind, tuple):
        named: Any = kind
        return tuple(named._fields)
    slots: Any = kind.__dict__.get("__slots__")
    if slots is None:
        raise TypeError(f"{kind.__qualname__} has no __slots__")
    return tuple(sorted(slots))


def _refuse(value: object) -> Any:
    raise TypeError(f"a {type(value).__qualname__} cannot be part of a stored state")
