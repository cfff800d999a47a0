"""Memory that two libraries share: every use sees the previous use of either library."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.adapters.torch import kernels as adapter
from preheat.devices.array import Array
from preheat.devices.operands import strided, tensor_kind
from preheat.errors import LaunchError
from preheat.gpu import Gpu
from preheat.kernels.ops import Ops
from tests.interop.support import (
    BLOCK,
    GRID,
    PEERS,
    SOURCE,
    CuPy,
    N,
    Peer,
    Producer,
    ReadOnlyInterface,
    Torch,
    Work,
    distinct,
)  # fmt: skip

exported = pytest.mark.parametrize("how", ["dlpack", "interface"])
sides = pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])

# Functions that write a value into an array, or copy an array into another, after preparation.


def by_replay(work: Work, body: Callable[[], None]) -> Callable[[], None]:
    with work.gpu.capture() as graph:
        body()
    return graph.replay


def bound(work: Work, name: str, *args: Any) -> Callable[[], None]:
    return work.kernel(name).bind(*args, N, grid=GRID, block=BLOCK)


def copied(work: Work, a: Array, value: float) -> Callable[[], object]:
    source = work.gpu.array(np.full(N, value, np.float32))
    return lambda: a.copy_from(source)


WRITES: dict[str, Callable[[Work, Array, float], Callable[[], object]]] = {
    "launch": lambda work, a, value: lambda: work.put(a, value),
    "bound launch": lambda work, a, value: bound(work, "put", a, value),
    "replay": lambda work, a, value: by_replay(work, lambda: work.put(a, value)),
    "fill": lambda _, a, value: lambda: a.fill(value),
    "copy": copied,
    "copy from the host": lambda _, a, value: lambda: a.write(np.full(N, value, np.float32)),
}
READS: dict[str, Callable[[Work, Array, Array], Callable[[], object]]] = {
    "launch": lambda work, a, out: lambda: work.copy(a, out),
    "bound launch": lambda work, a, out: bound(work, "copy", a, out),
    "replay": lambda work, a, out: by_replay(work, lambda: work.copy(a, out)),
    "copy": lambda _, a, out: lambda: out.copy_from(a),
    "copy to the host": lambda _, a, out: lambda: out.write(a.numpy()),
}


@pytest.mark.gpu
@sides
@exported
@pytest.mark.parametrize("name", READS)
def test_a_use_of_an_exported_array_sees_what_its_consumer_wrote_before(
    name: str, how: str, side: bool, work: Work, peer: Peer
) -> None:
    a, out = work.gpu.zeros(N), work.gpu.zeros(N)
    with peer.place(side=side):
        view = peer.take(a, how)
        read = READS[name](work, a, out)
        read()
        for value in (7.0, 8.0):
            peer.linger()
            peer.fill(view, value)
            read()
            assert distinct(out.numpy()) == {value}


@pytest.mark.gpu
@sides
@exported
@pytest.mark.parametrize("name", WRITES)
def test_the_consumer_of_an_array_sees_what_was_written_into_it_before(
    name: str, how: str, side: bool, work: Work, peer: Peer
) -> None:
    a = work.gpu.zeros(N)
    with peer.place(side=side):
        view = peer.take(a, how)
        write = WRITES[name](work, a, 9.0)
        write()
        for old in (1.0, 2.0):
            work.put(a, old)
            work.gpu.synchronize()
            work.linger()
            write()
            assert distinct(peer.host(peer.copied(view))) == {9.0}


@pytest.mark.gpu
@sides
@exported
@pytest.mark.parametrize("name", WRITES)
def test_what_the_consumer_still_reads_is_not_overwritten(
    name: str, how: str, side: bool, work: Work, peer: Peer
) -> None:
    a = work.gpu.zeros(N)
    with peer.place(side=side):
        view = peer.take(a, how)
        write = WRITES[name](work, a, 9.0)
        write()
        work.put(a, 4.0)
        work.gpu.synchronize()
        peer.linger()
        seen = peer.copied(view)
        write()
        assert distinct(peer.host(seen)) == {4.0}
        assert distinct(a.numpy()) == {9.0}


@pytest.mark.gpu
@sides
@exported
@pytest.mark.parametrize("name", READS)
def test_the_consumer_does_not_overwrite_what_is_still_read(
    name: str, how: str, side: bool, work: Work, peer: Peer
) -> None:
    a, out = work.gpu.zeros(N), work.gpu.zeros(N)
    with peer.place(side=side):
        view = peer.take(a, how)
        read = READS[name](work, a, out)
        read()
        work.put(a, 4.0)
        work.gpu.synchronize()
        work.linger()
        read()
        peer.fill(view, 5.0)
        assert distinct(out.numpy()) == {4.0}
        assert distinct(a.numpy()) == {5.0}


# The end of an export


def shared(a: Array) -> bool:
    """Return True while another library may use this memory."""
    return a.buffer.uses.exported and a.uses.writer is None


@pytest.mark.gpu
def test_an_array_is_ours_alone_again_once_its_consumers_have_released_it(
    work: Work, peer: Peer
) -> None:
    a = work.gpu.zeros(N)
    own = work.gpu._context.stream
    first, second = peer.take(a), peer.take(a)
    assert shared(a)
    del first
    gc.collect()
    assert shared(a)
    work.put(a, 2.0)
    assert shared(a)
    del second
    gc.collect()
    assert not a.buffer.uses.exported
    work.put(a, 3.0)
    assert a.uses.writer is own
    assert distinct(a.numpy()) == {3.0}


@pytest.mark.gpu
def test_an_array_given_by_its_interface_stays_shared(work: Work, peer: Peer) -> None:
    a = work.gpu.zeros(N)
    view = peer.take(a, "interface")
    del view
    gc.collect()
    work.put(a, 3.0)
    assert shared(a)
    assert distinct(a.numpy()) == {3.0}


@pytest.mark.gpu
def test_what_a_consumer_did_in_a_stream_before_the_release_comes_first(work: Work, peer: Peer) -> None:
    a, out = work.gpu.zeros(N), work.gpu.zeros(N)
    view = peer.take(a)
    with peer.stream():
        peer.linger()
        peer.fill(view, 5.0)
        del view
        gc.collect()
        with peer.stream():  # No earlier work is pending in it.
            assert not a.buffer.uses.exported
            work.copy(a, out)
            assert distinct(out.numpy()) == {5.0}


# Arrays whose home is another stream of preheat


@pytest.mark.gpu
@pytest.mark.parametrize("whose", ["preheat", *PEERS])
def test_a_launch_waits_again_for_more_work_in_the_stream_of_its_array(whose: str, work: Work) -> None:
    gpu = work.gpu
    side = work.gpu.stream()
    theirs = None if whose == "preheat" else PEERS[whose]()
    out = gpu.zeros(N) if theirs is None else theirs.full(0.0)
    x = gpu.zeros(N, stream=side)
    for value in (5.0, 6.0):
        work.copy(x, out)
        gpu.synchronize()
        work.linger(side)
        work.put(x, value, side)
        work.copy(x, out)
        gpu.synchronize()
        assert distinct(out.numpy() if theirs is None else theirs.host(out)) == {value}


# Subclasses of torch's tensors


def subclassed(torch: Torch, x: Any) -> Any:
    """Return the same tensor as an object of a new subclass."""
    return x.as_subclass(type("Fresh", (torch.module.Tensor,), {}))


def plain(torch: Torch, x: Any) -> Any:
    return x.detach().as_subclass(torch.module.Tensor)


@pytest.mark.gpu
@sides
def test_torch_sees_what_a_kernel_wrote_into_a_subclass_of_its_tensors(
    side: bool, work: Work, torch_peer: Torch
) -> None:
    with torch_peer.place(side=side):
        x = subclassed(torch_peer, torch_peer.full(0.0))
        kind = tensor_kind(x)
        assert kind is not None
        assert kind.library == "torch"
        for value in (1.0, 5.0):
            work.linger()  # Our own stream is busy, and that of torch is not.
            work.put(x, value)
            assert distinct(torch_peer.host(plain(torch_peer, x).clone())) == {value}


@pytest.mark.gpu
@sides
@pytest.mark.parametrize("kind", ["tensor", "parameter", "parameter with a gradient"])
def test_a_kernel_sees_what_torch_wrote_into_a_subclass_before(
    kind: str, side: bool, work: Work, torch_peer: Torch
) -> None:
    torch = torch_peer.module
    with torch_peer.place(side=side):
        x, out = torch_peer.full(0.0), torch_peer.full(0.0)
        if kind == "tensor":
            given = subclassed(torch_peer, x)
        else:
            fresh = type("Fresh", (torch.nn.Parameter,), {})
            given = fresh(x, requires_grad=kind.endswith("gradient"))
        for value in (3.0, 4.0):
            torch_peer.linger()
            with torch.no_grad():
                given.fill_(value)
            work.copy(given, out)
            assert distinct(torch_peer.host(out)) == {value}


@pytest.mark.gpu
def test_an_operator_for_torch_takes_a_subclass_of_its_tensors(
    work: Work, torch_peer: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = torch_peer.module
    monkeypatch.setitem(adapter._known, 0, Ops(work.gpu))
    x = torch.linspace(-4.0, 4.0, 33 * 31, device="cuda").reshape(33, 31)
    wanted = torch.nn.functional.silu(x.double())
    for _ in range(2):
        work.linger()
        y = plain(torch_peer, adapter.silu(subclassed(torch_peer, x))).clone()
        torch.cuda.current_stream().synchronize()
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)


# Tensors whose memory does not hold their values, or is not contiguous


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [0, 4])
def test_a_conjugated_tensor_is_refused_and_a_resolved_one_is_not(
    warm: int, work: Work, torch_peer: Torch
) -> None:
    torch = torch_peer.module
    pairs = work.kernel("pairs")
    real = torch.arange(33.0, device="cuda")
    z = torch.complex(real, real + 1)
    out = torch.zeros_like(z)
    for _ in range(warm):
        pairs[1, 64](z, out, 33)
    with pytest.raises(LaunchError, match="argument 0: the tensor is conjugated"):
        pairs[1, 64](z.conj(), out, 33)
    pairs[1, 64](z.conj().resolve_conj(), out, 33)
    assert torch.equal(out, z.conj().resolve_conj())


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [0, 4])
def test_a_negated_tensor_is_refused_and_a_resolved_one_is_not(
    warm: int, gpu: Gpu, torch_peer: Torch
) -> None:
    torch = torch_peer.module
    copy = gpu.kernel(SOURCE, "copy")
    x = torch.arange(1.0, 34.0, device="cuda")
    out = torch.zeros(33, device="cuda")
    for _ in range(warm):
        copy[1, 64](x, out, 33)
    with pytest.raises(LaunchError, match="argument 0: the tensor is negated"):
        copy[1, 64](torch._neg_view(x), out, 33)
    copy[1, 64](torch._neg_view(x).resolve_neg(), out, 33)
    assert torch.equal(out, -x)


def ramp(work: Work, peer: Peer, count: int) -> Any:
    """Return an array of another library with the values 0, 1, 2 and so on."""
    return peer.copied(peer.take(work.gpu.array(np.arange(count, dtype=np.float32))))


@pytest.mark.gpu
def test_every_third_element_is_passed_where_the_launch_says_so(work: Work, peer: Peer) -> None:
    base = ramp(work, peer, 3 * N)
    out = peer.full(0.0)
    for _ in range(4):
        with pytest.raises(LaunchError, match=r"argument 0: .* is not contiguous"):
            work.gather(base[::3], 3, out)
        work.gather(strided(base[::3]), 3, out)
    np.testing.assert_array_equal(peer.host(out), np.arange(0, 3 * N, 3, dtype=np.float32))
    peer.linger()
    peer.fill(base, 2.0)
    work.gather(strided(base[::3]), 3, out)
    assert distinct(peer.host(out)) == {2.0}


@pytest.mark.gpu
def test_a_reversed_array_of_cupy_is_passed_by_its_first_element(work: Work) -> None:
    peer = CuPy()
    base = ramp(work, peer, 2 * N)
    out = peer.full(0.0)
    for _ in range(4):
        work.gather(strided(base[::-2]), -2, out)
        expected = np.arange(2 * N, dtype=np.float32)[::-2]
        np.testing.assert_array_equal(peer.host(out), expected)


# Tensors that lose their memory while a graph uses them


def by_data(torch: Any, x: Any) -> None:
    x.data = torch.ones(4, device="cuda")


SWAPS: dict[str, Callable[[Any, Any], object]] = {
    "x.data = other": by_data,
    "x.set_()": lambda _, x: x.set_(),
    "x.resize_(0)": lambda _, x: x.resize_(0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("how", SWAPS)
def test_a_graph_keeps_the_memory_that_its_tensor_had_when_it_was_captured(
    how: str, work: Work, torch_peer: Torch
) -> None:
    x = torch_peer.full(0.0)
    place = x.data_ptr()
    with work.gpu.capture() as graph:
        work.put(x, 5.0)
    graph.replay()
    torch_peer.synchronize()
    SWAPS[how](torch_peer.module, x)
    gc.collect()
    # One of them would get that memory if it were free.
    others = [torch_peer.full(3.0) for _ in range(8)]
    graph.replay()
    torch_peer.synchronize()
    assert place not in [each.data_ptr() for each in others]
    assert set().union(*(distinct(torch_peer.host(each)) for each in others)) == {3.0}


# Producers that have only DLPack or the array interface


class Only:
    """A tensor of torch as JAX, TensorFlow or Warp would export it; `asked` has the streams."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.asked = list[int | None]()
        self.shape, self.dtype = data.shape, data.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.asked.append(stream)
        return self.data.__dlpack__(stream=stream)


@pytest.mark.gpu
@sides
def test_a_producer_is_asked_for_the_stream_of_the_launch_and_never_for_stream_0(
    side: bool, work: Work, torch_peer: Torch
) -> None:
    with torch_peer.place(side=side):
        x = Only(torch_peer.full(1.0))
        y = torch_peer.full(0.0)
        for _ in range(4):
            work.copy(x, y)
        assert distinct(torch_peer.host(y)) == {1.0}
        assert x.asked == [torch_peer.current().cuda_stream or 1] * 4
        own = work.gpu.zeros(N)
        work.copy(x, own)
        assert distinct(own.numpy()) == {1.0}
        assert x.asked[4:] == [work.gpu._context.stream.handle]


@pytest.mark.parametrize("warm", [0, 4])
def test_a_read_only_producer_is_taken_for_a_const_pointer_only(warm: int, device: Gpu) -> None:
    put, copy = device.kernel(SOURCE, "put"), device.kernel(SOURCE, "copy")
    x = device.array(np.arange(33, dtype=np.float32))
    out = device.zeros(33)
    for _ in range(warm):
        put[1, 64](out, 0.0, 33)
        copy[1, 64](out, out, 33)
    fixed = Producer(x, read_only=True)
    with pytest.raises(LaunchError, match=r"argument 0: Producer is read-only, and float\* may be"):
        put[1, 64](fixed, 1.0, 33)
    copy[1, 64](fixed, out, 33)
    assert np.array_equal(out.numpy(), np.arange(33))
    put[1, 64](Producer(x), 2.0, 33)
    assert distinct(x.numpy()) == {2.0}


@pytest.mark.gpu
def test_a_read_only_array_interface_is_taken_for_a_const_pointer_only(work: Work) -> None:
    x = work.gpu.array(np.arange(N, dtype=np.float32))
    out = work.gpu.zeros(N)
    fixed = ReadOnlyInterface(x)
    with pytest.raises(LaunchError, match="argument 0: ReadOnlyInterface is read-only"):
        work.put(fixed, 1.0)
    work.copy(fixed, out)
    assert np.array_equal(out.numpy(), np.arange(N, dtype=np.float32))


def test_a_read_only_array_of_numpy_is_taken_for_a_const_pointer_only(
    permissive: Gpu,
) -> None:
    x = np.arange(33, dtype=np.float32)
    out = permissive.zeros(33)
    x.setflags(write=False)
    with pytest.raises(LaunchError, match="argument 0: ndarray is read-only"):
        permissive.kernel(SOURCE, "put")[1, 64](x, 1.0, 33)
    permissive.kernel(SOURCE, "copy")[1, 64](x, out, 33)
    assert np.array_equal(out.numpy(), x)


def test_a_tensor_of_an_unknown_version_of_dlpack_is_refused(device: Gpu) -> None:
    x, out = device.zeros(33), device.zeros(33)
    copy = device.kernel(SOURCE, "copy")
    with pytest.raises(LaunchError, match=r"argument 0: .*DLPack version 2\.0, and preheat reads"):
        copy[1, 64](Producer(x, major=2), out, 33)
    copy[1, 64](Producer(x), out, 33)
    device.synchronize()
    del x
    gc.collect()
