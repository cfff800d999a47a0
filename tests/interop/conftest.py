"""Fixtures for the tests with torch and CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from preheat.gpu import Gpu
from tests.interop.support import PEERS, Peer, Torch, Work


@pytest.fixture
def gpu(open_device: Callable[..., Gpu]) -> Iterator[Gpu]:
    made = open_device("cuda")
    yield made
    made.synchronize()


@pytest.fixture
def work(gpu: Gpu) -> Work:
    made = Work(gpu)
    made.warm()
    return made


@pytest.fixture(params=PEERS)
def peer(request: pytest.FixtureRequest) -> Peer:
    """Return each library."""
    return PEERS[request.param]()


@pytest.fixture
def torch_peer() -> Torch:
    return Torch()
