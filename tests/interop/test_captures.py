"""Work of preheat in a capture of another library: captured or refused, without invalidating it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.errors import CaptureError
from preheat.gpu import Gpu
from preheat.kernels.ops import Ops
from tests.interop.support import CuPy, N, Peer, Recording, Work, distinct, refusal
from tests.threads import run_in_thread

pytestmark = pytest.mark.gpu


class Scene(NamedTuple):
    """Everything that work in a capture may use."""

    work: Work
    peer: Peer
    x: Any  # arrays of the library
    y: Any
    own: Array  # not exported
    shared: Array  # exported to the library
    view: Any
    graph: Any  # of a launch on `own`

    @property
    def gpu(self) -> Gpu:
        return self.work.gpu

    def recorded(self, act: Callable[[], object]) -> tuple[Recording, CaptureError | None]:
        """Return the graph that the library captures around `act`, and the refusal of `act`."""
        with self.peer.capture() as graph:
            self.peer.add(self.x, 1.0)
            refused = refusal(act)
            self.peer.add(self.x, 1.0)
        return graph, refused

    def replay(self, graph: Recording, turn: int) -> None:
        """Replay the graph, and check the work of the library in it."""
        graph.replay()
        assert distinct(self.peer.host(self.x)) == {2.0 * turn}

    def go_on(self) -> None:
        """Check that both libraries still work."""
        self.peer.fill(self.x, 11.0)
        self.work.copy(self.x, self.own)
        assert distinct(self.own.numpy()) == {11.0}
        self.work.put(self.own, 12.0)
        self.work.copy(self.own, self.y)
        assert distinct(self.peer.host(self.y)) == {12.0}


@pytest.fixture
def scene(work: Work, peer: Peer) -> Scene:
    own, shared = work.gpu.zeros(N), work.gpu.zeros(N)
    made = Scene(work, peer, peer.full(0.0), peer.full(0.0), own, shared, peer.take(shared), None)
    made.go_on()
    with work.gpu.capture() as graph:
        work.put(own, 7.0)
    graph.replay()
    made.peer.fill(made.x, 0.0)
    work.gpu.synchronize()
    return made._replace(graph=graph)


# Work on arrays of the library


def twice(scene: Scene) -> None:
    scene.work.copy(scene.x, scene.view)
    scene.work.copy(scene.view, scene.y)


INSIDE: dict[str, Callable[[Scene], object]] = {
    "launch": lambda scene: scene.work.copy(scene.x, scene.y),
    "two launches": twice,
    "launch in the captured stream": lambda scene: scene.work.copy(
        scene.x, scene.y, scene.peer.current()
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_launch_on_arrays_of_the_capturing_library_becomes_part_of_its_graph(
    name: str, scene: Scene
) -> None:
    graph, refused = scene.recorded(lambda: INSIDE[name](scene))
    assert refused is None
    assert distinct(scene.peer.host(scene.y)) == {12.0}  # Nothing has run yet.
    for turn in (1, 2, 3):
        scene.replay(graph, turn)
        assert distinct(scene.peer.host(scene.y)) == {2.0 * turn - 1}
    scene.go_on()


def test_a_bound_launch_becomes_part_of_another_librarys_graph(scene: Scene) -> None:
    bound = scene.work.kernel("copy").bind(scene.x, scene.y, N, grid=-(-N // 256), block=256)
    bound()
    scene.gpu.synchronize()
    graph, refused = scene.recorded(bound)
    for turn in (1, 2):
        scene.replay(graph, turn)
        if refused is None:
            assert distinct(scene.peer.host(scene.y)) == {2.0 * turn - 1}
    scene.go_on()


@pytest.mark.parametrize("name", ["silu", "softmax"])
def test_a_shipped_kernel_becomes_part_of_another_librarys_graph(name: str, scene: Scene) -> None:
    op = getattr(Ops(scene.gpu, blas=False), name)
    op(scene.x, out=scene.y)
    scene.peer.synchronize()
    graph, refused = scene.recorded(lambda: op(scene.x, out=scene.y))
    assert refused is None
    same, expected = scene.peer.full(0.0), scene.peer.full(0.0)
    for turn in (1, 2):
        scene.replay(graph, turn)
        scene.peer.fill(same, 2.0 * turn - 1)
        op(same, out=expected)
        np.testing.assert_array_equal(scene.peer.host(scene.y), scene.peer.host(expected))
    scene.go_on()


# Work that cannot be captured

REFUSED: dict[str, Callable[[Scene], object]] = {
    "launch on an array of ours and one of the library": lambda scene: scene.work.copy(
        scene.x, scene.own
    ),
    "launch on an array of ours in the captured stream": lambda scene: scene.work.put(
        scene.own, 1.0, scene.peer.current()
    ),
    "launch on an array that the library has": lambda scene: scene.work.put(scene.shared, 1.0),
    "fill of an array that the library has": lambda scene: scene.shared.fill(1.0),
    "copy of an array that the library has": lambda scene: scene.own.copy_from(scene.shared),
    "copy of such an array to the host": lambda scene: scene.shared.numpy(),
    "copy of an array of the library": lambda scene: scene.gpu.array(scene.x),
    "from_dlpack": lambda scene: scene.peer.take(scene.own),
    "gpu.synchronize()": lambda scene: scene.gpu.synchronize(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_work_that_another_capture_cannot_hold_is_refused_and_the_capture_continues(
    name: str, scene: Scene
) -> None:
    graph, refused = scene.recorded(lambda: REFUSED[name](scene))
    assert refused is not None
    assert "captur" in str(refused)
    for turn in (1, 2):
        scene.replay(graph, turn)
    assert distinct(scene.own.numpy()) == {7.0}
    assert distinct(scene.shared.numpy()) == {0.0}
    scene.go_on()


def test_the_array_interface_is_refused_inside_a_capture_of_cupy(work: Work) -> None:
    peer = CuPy()
    own = work.gpu.zeros(N)
    x = peer.full(0.0)
    with peer.capture() as graph:
        peer.add(x, 1.0)
        refused = refusal(lambda: peer.take(own, "interface"))
    assert refused is not None
    graph.replay()
    assert distinct(peer.host(x)) == {1.0}
    work.put(own, 3.0)
    assert distinct(peer.host(peer.take(own, "interface"))) == {3.0}


# Work in other streams

BESIDE: dict[str, Callable[[Scene], object]] = {
    "launch": lambda scene: scene.work.put(scene.own, 5.0),
    "fill": lambda scene: scene.own.fill(5.0),
    "copy from the host": lambda scene: scene.own.write(np.full(N, 5, np.float32)),
    "copy to the host": lambda scene: scene.own.write(scene.own.numpy() - 2),
    "new array": lambda scene: scene.own.copy_from(
        scene.gpu.array(np.full(N, 5, np.float32)),
    ),
    "replay": lambda scene: scene.graph.replay(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_work_on_arrays_that_no_library_has_is_done_at_once_beside_a_capture(
    name: str, scene: Scene
) -> None:
    """The work may also be refused. It never becomes part of the library's graph."""
    wanted = 7.0 if name == "replay" else 5.0
    scene.own.fill(0.0 if name == "replay" else 7.0)
    graph, refused = scene.recorded(lambda: BESIDE[name](scene))
    if refused is None:
        assert distinct(scene.own.numpy()) == {wanted}
    scene.own.fill(1.0)
    for turn in (1, 2):
        scene.replay(graph, turn)
        assert distinct(scene.own.numpy()) == {1.0}
    scene.go_on()


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_memory_is_released_in_another_thread_without_invalidating_a_capture(
    mode: str, exported: bool, work: Work, peer: Peer
) -> None:
    x = peer.full(0.0)
    a = work.gpu.zeros(33)
    if exported:
        view = peer.take(a)
        del view
    del a  # Its memory is freed at the next allocation.
    with peer.capture(mode) as graph:
        peer.add(x, 1.0)
        run_in_thread(lambda: work.gpu.empty(1024))
        peer.add(x, 1.0)
    for turn in (1, 2):
        graph.replay()
        assert distinct(peer.host(x)) == {2.0 * turn}


# cuBLAS


def matrix(gpu: Gpu, peer: Peer, values: np.ndarray[Any, Any]) -> Any:
    """Return a matrix in memory of the library."""
    return peer.copied(peer.take(gpu.array(values)))


@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.parametrize("warm", [False, True], ids=["new stream", "warmed stream"])
def test_products_by_cublas_are_part_of_another_librarys_graph_or_refused(
    warm: bool, products: int, work: Work, peer: Peer
) -> None:
    ops = Ops(work.gpu)
    if ops.blas is None:
        pytest.skip("there is no cuBLAS here")
    random = np.random.default_rng(10)
    left, right = (random.standard_normal(shape).astype(np.float32) for shape in ((129, 65), (65, 257)))
    exact = left.astype(np.float64) @ right
    a, b = matrix(work.gpu, peer, left), matrix(work.gpu, peer, right)
    results = [matrix(work.gpu, peer, np.zeros((129, 257), np.float32)) for _ in range(products)]
    x = peer.full(0.0)
    other = peer.copied(results[0])
    ops.gemm(a, b, out=other)
    peer.synchronize()
    with peer.stream() as side:
        if warm:
            ops.gemm(a, b, out=other)
    refusals: list[CaptureError | None] = []
    with peer.capture(stream=side) as graph:
        peer.add(x, 1.0)
        for c in results:
            refusals.append(refusal(partial(ops.gemm, a, b, out=c)))
    for turn in (1, 2, 3):
        ops.gemm(a, b, out=other)  # The workspaces of other streams are in use.
        for c in results:
            peer.fill(c, -1.0)
        graph.replay()
        ops.gemm(a, b, out=other)
        assert distinct(peer.host(x)) == {float(turn)}
        for c, refused in zip(results, refusals, strict=True):
            wanted = exact if refused is None else np.full_like(exact, -1.0)
            np.testing.assert_allclose(peer.host(c), wanted, rtol=1e-3, atol=1e-3)
    del graph
    gc.collect()
    work.gpu.synchronize()
    ops.gemm(a, b, out=other)
    np.testing.assert_allclose(peer.host(other), exact, rtol=1e-3, atol=1e-3)


# CuPy in a capture of preheat


def test_graphs_of_relaxed_captures_do_not_share_what_cupy_allocated_in_them(gpu: Gpu) -> None:
    cupy = CuPy().module
    x = cupy.arange(N, dtype=cupy.float32)
    wanted = cupy.asnumpy(x + 5.0)  # The kernel is compiled.
    cupy.cuda.runtime.deviceSynchronize()
    with gpu.capture(mode="relaxed") as first:
        y = x + 1.0
    del y
    gc.collect()
    with gpu.capture(mode="relaxed") as second:
        z = x + 5.0
    second.replay()
    np.testing.assert_array_equal(cupy.asnumpy(z), wanted)
    first.replay()
    np.testing.assert_array_equal(cupy.asnumpy(z), wanted)
    others = [cupy.full(N, -3.0, cupy.float32) for _ in range(8)]
    for graph in (first, second):
        graph.replay()
    assert set().union(*(distinct(cupy.asnumpy(each)) for each in others)) == {-3.0}
    np.testing.assert_array_equal(cupy.asnumpy(z), wanted)


# Graphs of preheat in a capture of others. They come last: a refusal may invalidate the capture.


def test_a_replay_on_arrays_of_the_capturing_library_is_part_of_its_graph_or_refused(
    scene: Scene,
) -> None:
    with scene.gpu.capture() as ours:
        scene.work.copy(scene.x, scene.y)
    ours.replay()
    scene.gpu.synchronize()
    graph, refused = scene.recorded(ours.replay)
    for turn in (1, 2):
        scene.replay(graph, turn)
        if refused is None:
            assert distinct(scene.peer.host(scene.y)) == {2.0 * turn - 1}
    ours.close()
    scene.go_on()
