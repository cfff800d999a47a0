"""Runs the examples of docstrings in one process, and prints the failures as JSON.

python -m tests.docstring_examples MODULE... runs those of the public names of these modules. Every
example finds `preheat`, `np`, `gpu` and `SAXPY`, and the files `saxpy.cu` and `kernels.toml`.
"""

from __future__ import annotations

import doctest
import io
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import preheat
from tests.conftest import SAXPY
from tests.public_names import PublicName, examples_of, public_names

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def main(modules: list[str]) -> None:
    """Run the examples in the current directory, which is empty."""
    warnings.simplefilter("error")
    Path("saxpy.cu").write_text(SAXPY)
    Path("kernels.toml").write_text(
        'version = 1\n[[program]]\nfile = "saxpy.cu"\nentries = ["saxpy"]\narch = ["sm_90"]\n'
    )
    seen: set[int] = set()
    found: dict[str, dict[str, Any]] = {}
    for module in modules:
        if module == "preheat.adapters.torch":
            warnings.simplefilter("default")  # Warnings of torch about itself do not fail a test.
        texts = list(_run(module, seen))
        found[module] = {"examples": len(texts), "failures": [text for text in texts if text]}
    print(json.dumps(found))  # noqa: T201


def _run(module: str, seen: set[int]) -> Iterator[str]:
    """Run the examples of a module, and yield the failures of each name as a text."""
    for name in public_names(module):
        examples = examples_of(name)
        if not examples or id(name.value) in seen:  # Two classes may have a method of a common base.
            continue
        seen.add(id(name.value))
        if 'device="cuda"' not in name.docstring or _torch_sees_a_gpu():
            yield _failures(name, examples)


def _torch_sees_a_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _failures(name: PublicName, examples: list[doctest.Example]) -> str:
    names = {"preheat": preheat, "np": np, "gpu": preheat.device("emulator"), "SAXPY": SAXPY}
    test = doctest.DocTest(examples, names, name.name, name.module, 0, name.docstring)
    said = io.StringIO()
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.write, clear_globs=True)
    return said.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
