"""What the command line says about compiles that no adapter covers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from preheat.ahead.manifest import Unrecorded
from preheat.cli.output import print_message

__all__ = ["hint_lines", "print_unrecorded"]

#: The variables that name the directories where a library keeps what it has compiled.
_OWN_CACHES = {"torch": "TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR"}


def hint_lines(what: str, libraries: Collection[str]) -> Iterator[str]:
    """Yield the lines of a hint about compiles of `libraries`, which `what` describes."""
    yield f"hint: preheat has no adapter for {what}:"
    yield "  build it ahead of time, or keep the files for the next start"
    for library in sorted(_OWN_CACHES.keys() & libraries):
        yield f"  (variables that name their directories: {_OWN_CACHES[library]})"


def print_unrecorded(items: Sequence[Unrecorded]) -> None:
    """Print what was compiled during a recording and is not recorded, if there is anything."""
    for item in items:
        print_message(f"not recorded: {item}")
    if libraries := {item.library for item in items}:
        print_message("\n".join(["", *hint_lines("what was not recorded", libraries)]))
