"""Writes every program that this process starts to the file STARTED, one a line."""

import os
import sys

_path = os.environ["STARTED"]


def _watch(event, arguments):
    if event == "subprocess.Popen" or event in ("os.posix_spawn", "os.exec"):
        words = arguments[1]
    elif event == "os.system":
        words = arguments[0]
    else:
        return
    words = [words] if isinstance(words, str | bytes | os.PathLike) else words
    with open(_path, "a") as file:
        file.write(" ".join(map(os.fsdecode, words)).replace("\n", " ") + "\n")


sys.addaudithook(_watch)
