"""The methods of `Graph` that draw it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from preheat.errors import GraphError
from preheat.graph.nodes import Node
from preheat.model.tracebacks import short_methods
from preheat.process.lazy import LazyModule
from preheat.process.messages import count

TYPE_CHECKING = False  # Type checkers assume True.
if TYPE_CHECKING:
    from preheat.graph.pictures import formats, picture
else:  # Most processes draw nothing.
    formats = LazyModule("preheat.graph.pictures.formats")
    picture = LazyModule("preheat.graph.pictures.picture")

__all__ = ["Drawable"]

_MAX_INLINE = 1500  # boxes in a notebook; such a picture has a megabyte


@short_methods()
class Drawable:
    """The drawing methods of a class that has nodes. `Graph` inherits them."""

    __slots__ = ()

    @property
    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order."""

    def svg(self, *, diff: Drawable | Sequence[Node] | None = None, fold: bool = True) -> str:
        """Draw the graph as an SVG document, which reads on light and dark pages.

        A box is a node: its name, its number in `nodes`, grid, block, shared memory and the bytes of
        its arguments, or the bytes of a fill or copy. An arrow leads from a node to one that waits for
        it (`Node.after`). Work of other libraries has dashed boxes. `replay(step=…)` in a box means
        that the node reads a scalar that `replay` can set. Tooltips have the whole name, the line that
        captured the node and its arguments. A notebook shows a graph like this.

        Args:
            diff: Another capture. What it adds, removes and changes is coloured and counted, and
                tooltips have the rows of `self.diff(other)`.
            fold: Draw a run of at least three nodes that look alike as one box with a count.

        Raises:
            GraphError: Nothing was captured yet, or the capture failed.

        Examples:
            >>> gpu = preheat.device("emulator")
            >>> x = gpu.zeros(1000)
            >>> with gpu.capture(name="step") as graph:
            ...     x = x.fill(1)
            >>> graph.svg().splitlines()[1]
            "<title>graph 'step': 1 node</title>"
        """
        return formats.as_svg(self._picture(diff, fold=fold))

    def dot(self, *, diff: Drawable | Sequence[Node] | None = None, fold: bool = True) -> str:
        """Return the graph in the language of Graphviz, with the content of `svg`.

        Args:
            diff: Another capture, as in `svg`.
            fold: Draw runs as one box, as in `svg`.

        Raises:
            GraphError: Nothing was captured yet, or the capture failed.

        Examples:
            >>> gpu = preheat.device("emulator")
            >>> x = gpu.zeros(1000)
            >>> with gpu.capture() as graph:
            ...     x = x.fill(1).fill(2)
            >>> graph.dot().splitlines()[-2]
            '  n0 -> n1;'
        """
        return formats.as_dot(self._picture(diff, fold=fold))

    def _repr_svg_(self) -> str | None:
        """Return the picture for a notebook.

        Without nodes, or with very many, return None, so that the notebook shows the repr.
        """
        if not self.nodes:
            return None
        drawn = self._picture(None, fold=True)
        return formats.as_svg(drawn) if len(drawn.items) <= _MAX_INLINE else None

    def _picture(self, other: Drawable | Sequence[Node] | None, *, fold: bool) -> picture.Picture:
        """Return what is drawn."""
        if not self.nodes:
            raise GraphError(
                f"{self} cannot be drawn: it has no nodes",
                hint="draw it after its capture: with gpu.capture() as graph: …",
            )
        if other is None:
            drawn = picture.picture_of(f"{self}: {_count_nodes(self.nodes)}", self.nodes)
        else:
            nodes = other.nodes if isinstance(other, Drawable) else other
            name = str(other) if isinstance(other, Drawable) else "another capture"
            drawn = picture.picture_of_change(f"{self} compared with {name}", self.nodes, nodes)
        return picture.folded(drawn) if fold else drawn


def _count_nodes(nodes: Sequence[Node]) -> str:
    foreign = sum(node.foreign for node in nodes)
    return count(len(nodes), "node") + (f", {foreign} of other libraries" if foreign else "")
