"""Fixtures of the tests of manifests: a kernel file, a manifest file, and a reader of text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest
from tests.ahead.manifest.support import KERNEL


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "app" / "kernels" / "k.cu"
    file.parent.mkdir(parents=True)
    file.write_text(KERNEL)
    return file


@pytest.fixture
def manifest_file(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir(exist_ok=True)
    return tmp_path / "app" / "kernels.toml"


@pytest.fixture
def read(manifest_file: Path) -> Callable[[str], Manifest]:
    """Reads a manifest with this text after its version."""

    def read_text(text: str) -> Manifest:
        manifest_file.write_text("version = 2\n" + textwrap.dedent(text))
        return Manifest.read(manifest_file)

    return read_text
