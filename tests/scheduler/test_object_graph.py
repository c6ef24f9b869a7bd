"""A state as bytes: whatever refers to whatever, and nothing but data."""

from array import array
from collections import OrderedDict
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import msgpack
import pytest
from msgspec import Struct

from headrace_scheduler.object_graph import ObjectGraph
from headrace_shared.errors import ProtocolError


class Node:
    __slots__ = ("content", "next")

    def __init__(self, content: Any) -> None:
        self.content = content
        self.next: Node | None = None


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    first: Any
    second: Any


class Message(Struct, frozen=True):
    text: str
    parts: tuple[int, ...] = ()


class Armed:
    """Would do something when it is made."""

    __slots__ = ()
    calls: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.calls.append("made")

    def __setstate__(self, state: object) -> None:
        self.calls.append("restored")


GRAPH = ObjectGraph([Node, Colour, Pair, Message, Armed])


def test_values_come_back_with_their_types() -> None:
    root = Node(
        {
            "plain": [None, True, -1, 1.5, "ä", b"\x00"],
            ("key", 1): (1, (2, 3)),
            Colour.RED: Pair(Message("text", (1, 2)), array("I", [1, 2**32 - 1])),
            "order": OrderedDict([("b", 1), ("a", 2)]),
        }
    )
    made = GRAPH.load(GRAPH.dump(root))
    assert made.content == root.content
    assert isinstance(made.content["order"], OrderedDict) and list(made.content["order"]) == ["b", "a"]
    assert isinstance(made.content[Colour.RED], Pair) and made.next is None


def test_what_was_one_object_is_one_object_and_circles_close() -> None:
    root, other = Node([]), Node("other")
    root.next, other.next = other, root
    root.content += [other, (root, other), {"self": root}]
    made = GRAPH.load(GRAPH.dump(root))
    assert made.next.next is made
    assert made.content[0] is made.next
    assert made.content[1] == (made, made.next) and made.content[2]["self"] is made
    assert GRAPH.dump(made) == GRAPH.dump(root)


@pytest.mark.parametrize("value", [lambda: None, object(), {1, 2}, Node, iter([]), array("d", [1.0])])
def test_what_is_no_data_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be part of a stored state"):
        GRAPH.dump(Node([value]))


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        {},
        [["object", 99, []]],
        [["object", 0, []]],
        [["list", 0, [[7]]]],
        [["eval", 0, ["1"]]],
        [["enum", 1, "BLUE"]],
        [["struct", 3, [1]]],
        [["named", 2, [1]]],
        [["tuple", 0, [[0]]]],
        [["dict", 0, [[1], 2]], ["list", 0, []]],
        [["array", 0, b"123"]],
    ],
)
def test_nonsense_is_an_error(nodes: object) -> None:
    with pytest.raises(ProtocolError):
        GRAPH.load(msgpack.packb(nodes))


def test_bytes_that_are_no_state_are_an_error() -> None:
    with pytest.raises(ProtocolError):
        GRAPH.load(b"\xc1")
    with pytest.raises(ProtocolError):
        GRAPH.load(b"\x80\x04\x95")


def test_reading_calls_nothing_of_a_class() -> None:
    GRAPH.load(msgpack.packb([["object", 4, []]]))
    assert Armed.calls == []


def test_another_set_of_fields_has_another_fingerprint() -> None:
    assert ObjectGraph([Node]).fingerprint != ObjectGraph([Pair]).fingerprint
    assert ObjectGraph([Node]).fingerprint == ObjectGraph([Node]).fingerprint
