"""Runs the examples of the page on errors in one process, and prints what they raise as JSON.

python -m tests.error_examples PAGE prints a list. Each row has the heading above an example, the name
of the error that it raised, and the message with its notes. The first example defines names for all.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.stories import blocks


def main(page: Path) -> None:
    """Run the examples in the current directory."""
    warnings.simplefilter("error")
    first, *examples = (block for block in blocks(page) if block.kind == "python")
    names: dict[str, Any] = {}
    exec(compile(first.text, "app.py", "exec"), names)
    lines = page.read_text().splitlines()
    rows = []
    for block in examples:
        heading = next(line for line in reversed(lines[: block.line]) if line.startswith("### "))
        rows.append((heading.removeprefix("### "), *_raised(block.text, dict(names))))
    print(json.dumps(rows))  # noqa: T201


def _raised(code: str, names: dict[str, Any]) -> tuple[str, str]:
    try:
        exec(compile(code, "app.py", "exec"), names)
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "", "nothing was raised"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
