"""Run `preheat demo` and draw what it prints: python docs/demo_picture.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import terminal

TARGET = Path(__file__).parent / "pictures" / "demo.svg"
#: Parts of the output that stand out, and how.
STYLES = {
    r"^\d/6 .*": "bold cyan",
    r"^ *\$ .*": "bold",
    r"^STEP .*": "dim",
    r"^\* .*|^  process to the first launch.*": "dim",
    r"preheat\.errors\.SealedError|SealedError": "bold red",
    r"done( in)?(?=[: ])": "green",
    r"\d[\d.,]* (µs|ms|s)\b": "yellow",
}


def main() -> None:
    """Run the demo on the emulator and write the picture."""
    words = [sys.executable, "-m", "preheat", "demo"]
    env = {**os.environ, "PREHEAT_DEVICE": "emulator"}
    done = subprocess.run(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    TARGET.write_text(terminal.draw(f"$ make demo\n{done.stdout}", "preheat demo", STYLES))


if __name__ == "__main__":
    main()
