"""Draw the report of an audit as a terminal: python docs/audit_picture.py OUT.svg -- COMMAND [ARG]...

It runs `preheat audit` on the command, and draws what that prints. The driver is the stand-in of
tests/audit, as the title says: without a GPU, a module cannot be loaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import terminal

TITLE = "preheat audit, with a stand-in for the driver of a GPU"
#: Parts of a report that stand out, and how.
STYLES = {
    r"^\$ .*": "bold",
    r"^[A-Z][a-z].*:?$": "bold cyan",
    r"^ *[A-Z]{3,}[A-Z ]+$": "dim",
    r"\(compiled\)|unknown|built:": "bold red",
    r"bundle: \S+|store: \S+|installed: \S+": "green",
    r"\d[\d.,]* (µs|ms|s|min)\b": "yellow",
    r"^hint:.*": "cyan",
}


def main() -> None:
    """Run the command and write the picture."""
    target, command = sys.argv[1], sys.argv[sys.argv.index("--") + 1 :]
    words = [sys.executable, "-m", "preheat", "audit", "--", *command]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    shown = shlex.join([os.path.basename(command[0]), *map(os.path.basename, command[1:])])
    report = done.stderr.strip().replace(shlex.join(command), shown)
    text = f"$ preheat audit -- {shown}\n{report}"
    Path(target).write_text(terminal.draw(text, TITLE, STYLES))


if __name__ == "__main__":
    main()
