"""What the command line says about compiles that no adapter covers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from preheat.ahead.manifest import Unrecorded
from preheat.tools.cli.output import print_message

__all__ = ["hint_lines", "print_unrecorded"]

#: The variables that name the directories where a library keeps what it has compiled.
_OWN_CACHES = {"torch": "TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR"}


def hint_lines(used: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield hints about libraries and the compilers that they use: one for each library."""
    compilers: dict[str, set[str]] = {}
    for library, compiler in used:
        compilers.setdefault(library, set()).add(compiler)
    for library, names in compilers.items():
        others = ", ".join(sorted(names - {library}))
        yield ""
        yield f"hint: preheat has no adapter for what {library} compiles{others and f' with {others}'}:"
        yield "  build it ahead of time, or keep the files for the next start"
        if library in _OWN_CACHES:
            yield f"  (variables that name their directories: {_OWN_CACHES[library]})"


def print_unrecorded(items: Sequence[Unrecorded]) -> None:
    """Print what was compiled during a recording and is not recorded, if there is anything."""
    for item in items:
        print_message(f"not recorded: {item}")
    for line in hint_lines((item.library, item.compiler) for item in items if item.compiler):
        print_message(line)
