"""What each kind of node defines: its number, its structure of parameters, and what may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from preheat.driver.graphs.graph import Graph, Node
from preheat.emulator.graph_work import Work

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = [
    "ATTRIBUTES_CHANGED", "FUNCTION_CHANGED", "PARAMETERS_CHANGED", "SUCCESS", "Described", "NodeKind",
]  # fmt: skip

#: Why an executable does not take the parameters of another node.
SUCCESS, PARAMETERS_CHANGED, FUNCTION_CHANGED, ATTRIBUTES_CHANGED = 0, 5, 7, 8


class Described(NamedTuple):
    """What a structure of parameters describes: the attributes of `Node` with these names."""

    work: Work
    name: str = ""
    parameters: bytes = b""


def _always(driver: Driver, old: Node, new: Described) -> int:
    del driver, old, new
    return SUCCESS


@dataclass(frozen=True)
class NodeKind:
    """A kind of node. Its structure is the newest version of it.

    Attributes:
        number: The number of the kind.
        size: The bytes of the structure.
        read: Returns what a structure describes. It is given the graph of a new node, or the node that
            changes.
        write: Returns the structure of a node.
        refusal: Returns why an executable cannot have other parameters in the place of a node, or 0.
        changes: False if the parameters can never change.
    """

    number: int
    size: int
    read: Callable[[Driver, bytes, Graph | Node], Described]
    write: Callable[[Driver, Node], bytes]
    refusal: Callable[[Driver, Node, Described], int] = _always
    changes: bool = True
