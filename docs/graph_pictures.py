"""Draw the pictures of docs/graphs.md, by running the program there that writes them.

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
PROGRAM = "picture.py"


def snippet() -> str:
    """Return the program of the section on pictures."""
    found = re.search(
        rf'^```python title="{PROGRAM}"\n(.*?)^```', (DOCS / "graphs.md").read_text(), re.M | re.S
    )
    assert found is not None
    return found[1]


def draw(into: Path) -> None:
    """Write the program and its pictures into a folder."""
    (into / PROGRAM).write_text(snippet())
    source = str(DOCS.parent / "src")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, sys.path)])}
    subprocess.run([sys.executable, PROGRAM], cwd=into, env=env, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Replace the committed pictures."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
        for name in NAMES:
            (PICTURES / name).write_text((Path(folder) / name).read_text())


if __name__ == "__main__":
    main()
