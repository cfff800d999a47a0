"""Manifests: the programs an application needs and the graphs it replays, as TOML that people edit.

    version = 2
    recorded = "kernels.recorded.heat@sha256:…"  # entries that cannot be made again, if there are any

    [[program]]
    label = "saxpy.cu"             # when it is not the name of the file
    file = "kernels/saxpy.cu"      # or `source`: a generated text, stored beside the manifest
    sha256 = "…"                   # of the file when it was recorded
    language = "cuda"              # when it does not follow from the name of the file
    options = ["-use_fast_math"]
    include = ["include"]          # after the directory of the file itself
    spelled = ["{caller}/include"] # how the application writes them, when that does not follow
    names = ["tk<float>"]
    entries = ["saxpy"]            # kernels that were used
    arch = ["sm_90"]
    seconds = 0.31                 # the longest compile that was measured
    requests = 3                   # number of requests
    callers = ["app.py:12"]        # lines that made them
    [program.headers]              # headers in memory are stored as `source` is
    "util.h" = "kernels.sources/….h"

    [[link]]                       # programs that are linked into one
    label = "app"                  # when it does not follow from the parts
    lto = true                     # link-time optimisation
    options = ["-O3"]              # of the linker
    parts = [                      # each with the keys that describe a program
        {file = "a.cu"},
        {file = "b.cu", names = ["tk<float>"]},
        {file = "lib.a", language = "library"},  # or cubin, ltoir, fatbin, object
    ]
                                   # entries, arch, seconds, requests and callers as in a program

    [[foreign]]                    # what another library compiled
    kind = "triton"                # the name of the adapter
    name = "kernels:add"
    root = "."                     # the directory from which `kernels` is imported
    request = '{"function": …}'    # the request, as the adapter wrote it
    recorded = '{"line": …}'       # facts of the recording, which a check compares
    coverage = "weak"              # or "closure"; "recorded" by default
    entries = ["…"]                # the entries that were used
                                   # arch, seconds, requests and callers as in a program

    [[graph]]
    name = "decode"
    keys = ["(1, 128)", "32"]      # Python literals

    [[unrecorded]]                 # what no adapter covers, so that no bundle has it
    library = "torch"
    compiler = "c++"               # without it, the library may have compiled, which nobody saw
                                   # seconds and callers as in a program

Paths are relative to the directory of the manifest. Generated texts are stored in
`<manifest>.sources/`, each under a name made from its SHA-256.

A bundle answers an application that asks for the same include directories, spelled as
`preheat.model.portable_paths` describes. Without `spelled`, a directory is taken relative to the
`file`, or to the working directory where the program has no `file`. Two programs may have equal texts
and different include directories.

Version 1 has `asked` and `by` for `requests` and `callers`. It is read, and written as version 2. A
manifest that is rewritten keeps the comments, the order and the layout of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from preheat.ahead.manifest.items import (
    COVERAGES,
    ForeignProgram,
    GraphKeys,
    ManifestProgram,
    UnreadableProgram,
    Unrecorded,
    key_literal,
)
from preheat.ahead.manifest.reader import Reader
from preheat.ahead.manifest.writer import write_manifest
from preheat.errors import InputError
from preheat.model.arch import Arch

__all__ = [
    "COVERAGES",
    "ForeignProgram",
    "GraphKeys",
    "Manifest",
    "ManifestProgram",
    "UnreadableProgram",
    "Unrecorded",
    "key_literal",
    "require_programs",
    "with_coverage",
]


@dataclass(frozen=True)
class Manifest:
    """Programs to compile, requests of other libraries, and graph keys to capture.

    `preheat record` writes it to a file in TOML.

    Attributes:
        programs: The programs.
        graphs: The graph keys.
        unreadable: The programs of a manifest file whose source could not be read.
        foreign: The requests of other libraries.
        recorded: The bundles with entries of `foreign` that cannot be made again, each with its pin.
        unrecorded: What the recorded runs compiled with compilers that no adapter covers.

    Examples:
        >>> manifest = preheat.Manifest.read("kernels.toml")
        >>> [item.program.label for item in manifest.programs]
        ['saxpy.cu']
    """

    programs: tuple[ManifestProgram, ...] = ()
    graphs: tuple[GraphKeys, ...] = ()
    unreadable: tuple[UnreadableProgram, ...] = ()
    foreign: tuple[ForeignProgram, ...] = ()
    recorded: tuple[str, ...] = field(default=(), compare=False)
    unrecorded: tuple[Unrecorded, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read the manifest at `path` and the sources of its programs.

        A program whose source cannot be read is listed in `unreadable` and does not stop the others.

        Raises:
            InputError: The file is not a manifest.

        Examples:
            >>> len(preheat.Manifest.read("kernels.toml").programs)
            1
        """
        reader = Reader(path)
        items, foreign, graphs, unrecorded = reader.read()
        recorded = reader.read_recorded()
        return cls(
            tuple(item for item in items if isinstance(item, ManifestProgram)),
            tuple(graphs),
            tuple(item for item in items if isinstance(item, UnreadableProgram)),
            tuple(foreign),
            (recorded,) if recorded else (),
            tuple(unrecorded),
        ).merged()

    def write(self, path: str | os.PathLike[str], *, fresh: bool = False) -> None:
        """Write the manifest to `path` in one step, and the generated sources beside it.

        Entries of other libraries that cannot be made again are written to a bundle beside it.
        Programs and graphs that this manifest does not have, and programs that were `unreadable`,
        are removed from the file.

        Args:
            path: The path of the file.
            fresh: Replace a manifest that exists at `path`. Without this, the file keeps its comments,
                its order and its layout.

        Raises:
            InputError: The file cannot be written. The old file is intact in that case.

        Examples:
            >>> preheat.Manifest.read("kernels.toml").write("copy.toml")
        """
        merged = self.merged()
        try:
            tables = (merged.programs, merged.foreign, merged.graphs, merged.unrecorded)
            write_manifest(path, *tables, recorded=merged.recorded, fresh=fresh)
        except OSError as fault:
            raise InputError(f"cannot write {path}: {fault.strerror or fault}") from fault
        except UnicodeEncodeError as bad:
            raise InputError(f"cannot write {path}: {bad.object!r} is not text") from None

    def merged(self, *others: Manifest) -> Manifest:
        """Return the union of all manifests. Equal programs become one, sorted by their identity.

        Examples:
            >>> manifest = preheat.Manifest.read("kernels.toml")
            >>> len(manifest.merged(manifest).programs)
            1
        """
        programs: dict[tuple[Any, ...], ManifestProgram] = {}
        foreign: dict[tuple[str, ...], ForeignProgram] = {}
        graphs: dict[str, dict[str, None]] = {}
        unrecorded: dict[tuple[str, ...], Unrecorded] = {}
        for manifest in (self, *others):
            for item in manifest.programs:
                identity = item.identity
                known = programs.get(identity, ManifestProgram(item.program))
                programs[identity] = known.merged(item)
            for other in manifest.foreign:
                nothing = ForeignProgram(other.kind, other.name, other.request)
                foreign[other.identity] = foreign.get(other.identity, nothing).merged(other)
            for each in manifest.unrecorded:
                unrecorded[each.identity] = unrecorded.get(each.identity, each).merged(each)
            for name, keys in manifest.graphs:
                graphs.setdefault(name, {}).update(dict.fromkeys(keys))
        return Manifest(
            _mark_ambiguous_titles([programs[identity] for identity in sorted(programs)]),
            tuple(GraphKeys(name, tuple(graphs[name])) for name in sorted(graphs)),
            tuple(bad for manifest in (self, *others) for bad in manifest.unreadable),
            tuple(foreign[identity] for identity in sorted(foreign)),
            tuple(dict.fromkeys(path for manifest in (self, *others) for path in manifest.recorded)),
            tuple(unrecorded[identity] for identity in sorted(unrecorded)),
        )

    def jobs(self, archs: Sequence[Arch] | None = None) -> list[tuple[ManifestProgram, Arch]]:
        """Pair every program with each of `archs`, or with its own architectures by default.

        Examples:
            >>> manifest = preheat.Manifest.read("kernels.toml")
            >>> archs = [preheat.Arch.parse("sm_80"), preheat.Arch.parse("sm_90")]
            >>> [(item.title, str(arch)) for item, arch in manifest.jobs(archs)]
            [('saxpy.cu', 'sm_80'), ('saxpy.cu', 'sm_90')]
        """
        return [
            (item, arch)
            for item in self.merged().programs
            for arch in _choose_archs(item.program.label, archs, item.archs)
        ]

    def foreign_jobs(
        self, archs: Sequence[Arch] | None = None
    ) -> list[tuple[ForeignProgram, Arch | None]]:
        """Pair every request of another library with each of `archs`, or with its own architectures.

        The architecture is None for an entry that depends on none.

        Examples:
            >>> preheat.Manifest.read("kernels.toml").foreign_jobs()
            []
        """
        jobs: list[tuple[ForeignProgram, Arch | None]] = []
        for item in self.merged().foreign:
            if item.request or item.archs:
                jobs += [(item, arch) for arch in _choose_archs(item.title, archs, item.archs)]
            else:
                jobs.append((item, None))
        return jobs


def _choose_archs(title: str, given: Sequence[Arch] | None, own: Sequence[Arch]) -> list[Arch]:
    """Return the architectures to compile for. Raises `InputError` when there are none."""
    if targets := sorted(set(given or own)):
        return targets
    raise InputError(
        f"{title}: there is no architecture to compile it for",
        hint="pass --arch, such as --arch sm_90",
    )


def _mark_ambiguous_titles(items: Iterable[ManifestProgram]) -> tuple[ManifestProgram, ...]:
    """Set `ambiguous_title` of the programs whose titles differ only in include directories."""
    include_lists: dict[str, set[tuple[str, ...]]] = {}
    unmarked = [replace(item, ambiguous_title=False) for item in items]
    for item in unmarked:
        include_lists.setdefault(item.title, set()).add(item.program.include_spellings)
    return tuple(replace(item, ambiguous_title=len(include_lists[item.title]) > 1) for item in unmarked)


def with_coverage(manifest: Manifest, coverage: str | None) -> Manifest:
    """Return the manifest with another coverage of all requests that a bake can make; see `COVERAGES`.

    None leaves the coverage as it is.
    """
    if coverage is None:
        return manifest
    foreign = (item if item.kept else replace(item, coverage=coverage) for item in manifest.foreign)
    return replace(manifest, foreign=tuple(foreign))


def require_programs(manifest: Manifest | str | os.PathLike[str]) -> Manifest:
    """Return the manifest, read from a file where a path is given.

    Raises `InputError` when it lists neither programs nor graphs.
    """
    found = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    if not (found.programs or found.foreign or found.unreadable or found.graphs):
        name = "the manifest" if isinstance(manifest, Manifest) else os.fspath(manifest)
        hint = "record what a program needs: preheat record -- python app.py"
        if found.unrecorded:
            hint = "the recorded run compiled only what no adapter covers: see [[unrecorded]]"
        raise InputError(f"{name} lists no program", hint=hint)
    return found
