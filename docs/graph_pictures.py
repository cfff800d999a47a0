"""Draw the pictures of docs/graphs.md, by running the snippet there that writes them.

python docs/graph_pictures.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
NAMES = ("graph.svg", "graph-diff.svg")


def snippet() -> str:
    """Return the first snippet of the section on pictures."""
    section = (DOCS / "graphs.md").read_text().partition("\n## Pictures\n")[2]
    found = re.search(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert found is not None
    return found[1]


def draw(into: Path) -> None:
    """Write the pictures into a folder."""
    source = str(DOCS.parent / "src")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, sys.path)])}
    subprocess.run(
        [sys.executable, "-c", snippet()], cwd=into, env=env, check=True, stdout=subprocess.DEVNULL
    )


def main() -> None:
    """Replace the committed pictures."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
        for name in NAMES:
            (PICTURES / name).write_text((Path(folder) / name).read_text())


if __name__ == "__main__":
    main()
