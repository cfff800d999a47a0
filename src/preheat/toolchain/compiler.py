"""The compilers behind one interface, located once and started when something must be compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.errors import InputError, ToolchainChangedError
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock
from preheat.toolchain.locate import Library, Located, locate

if TYPE_CHECKING:
    from preheat.model import linked_program
    from preheat.model.artifact import Artifact
    from preheat.toolchain import link, translate
    from preheat.toolchain import pool as workers
    from preheat.toolchain.translate import Compiled
else:
    linked_program = LazyModule("preheat.model.linked_program")  # Most processes link nothing.
    # Imported only when something must be compiled.
    link = LazyModule("preheat.toolchain.link")
    translate = LazyModule("preheat.toolchain.translate")
    workers = LazyModule("preheat.toolchain.pool")

__all__ = ["Toolchain", "own_roots"]

# The compilers of each language. A link of sources needs both.
_COMPILERS = {
    "cuda": ("nvrtc",),
    "ptx": ("nvJitLink",),
    "link": ("nvJitLink",),
    "cuda+link": ("nvrtc", "nvJitLink"),
}


class Toolchain:
    """NVRTC for CUDA C++, nvJitLink for PTX, both in worker processes.

    `memo_dir` is where the locations of the compilers are cached between processes.
    """

    def __init__(self, events: Events, *, timeout: float, memo_dir: Path | None = None) -> None:
        self._events = events
        self._timeout = timeout
        self._memo_dir = memo_dir
        self._located: Located | None = None
        self._pool: workers.WorkerPool | None = None
        self._relocated = False
        self._lock = Lock()
        self._pool_lock = Lock()

    @property
    def pool(self) -> workers.WorkerPool:
        """The worker processes. The first request starts one."""
        with self._pool_lock:
            if self._pool is None:
                self._pool = workers.WorkerPool(self._events, timeout=self._timeout)
            return self._pool

    @property
    def located(self) -> Located:
        """The locations of the compilers, which are looked up once."""
        if self._located is None:
            with self._lock:
                if self._located is None:
                    self._located = locate(lambda: self.pool, self._memo_dir)
        return self._located

    def identity(self, language: str) -> str:
        """Return the compilers of `language` as keys contain them: names and builds."""
        names = _COMPILERS[language]
        if len(names) > 1:
            return ", ".join(f"{name} {self._library(name).build}" for name in names)
        (name,) = names
        # No call of `_library` for a known compiler, because each lookup runs this.
        known = None if self._located is None else self._located.libraries.get(name)
        return f"{name} {(known or self._library(name)).build}"

    def version(self, language: str) -> str:
        """Return the name and the version of the compilers, such as `NVRTC 13.4.92`."""
        libraries = map(self._library, _COMPILERS[language])
        return ", ".join(f"{library.title} {library.version}" for library in libraries)

    def roots(self, program: Program) -> dict[str, str]:
        """Return include directories by label, in search order: the program's, then the toolkit's.

        The labels of a linked program begin with the index of the part and a dot.
        """
        if program.language != "cuda+link":
            return {**own_roots(program), **self.located.roots}
        assert isinstance(program, linked_program.LinkedProgram)
        return {
            f"{index}.{label}": directory
            for index, part in program.sources.items()
            for label, directory in self.roots(part).items()
        }

    def compile(self, program: Program, arch: Arch) -> Compiled:
        """Compile CUDA C++ or assemble PTX.

        Raises `CompileError` if the compiler rejects the program, `ToolchainError` if it fails itself.
        """
        if program.language == "ptx":
            return self._checked("nvJitLink", translate.assemble(self.pool, program, arch))
        if self.newest(arch) != arch:
            title = self.version("cuda")
            raise InputError(f"{title} cannot compile for {arch}", hint=self.supported_archs)
        library = self._library("nvrtc").path
        roots = self.roots(program)
        return self._checked("nvrtc", translate.compile_cuda(self.pool, library, program, arch, roots))

    def link(
        self, program: linked_program.LinkedProgram, arch: Arch, compiled: Mapping[int, Artifact]
    ) -> Compiled:
        """Link the parts of a program. `compiled` has the code of its CUDA C++ parts by their index.

        Raises `LinkError` if the linker rejects the parts, `ToolchainError` if it fails itself.
        """
        return self._checked("nvJitLink", link.link(self.pool, program, arch, compiled))

    @property
    def supported_archs(self) -> str:
        """A hint that lists the architectures that NVRTC compiles for."""
        return f"it supports {', '.join(f'sm_{number}' for number in self.located.archs)}"

    def newest(self, arch: Arch) -> Arch | None:
        """Return `arch` if NVRTC supports it, or the newest supported one before it, or None."""
        numbers = self.located.archs
        if arch.major * 10 + arch.minor in numbers:
            return arch
        known = [Arch.parse(str(number)) for number in numbers]
        return max((each for each in known if each < arch), default=None)

    def relocate(self) -> None:
        """Locate the compilers again, because one of them was replaced."""
        self.close()
        self._relocated = True
        with self._lock:
            self._located = locate(lambda: self.pool, self._memo_dir, fresh=True)

    def _library(self, name: str) -> Library:
        """Return the compiler `name`. If it was missing before, look for it once more."""
        located = self.located
        if name not in located.libraries and not self._relocated:
            self.relocate()
            located = self.located
        return located.library(name)

    def _checked(self, name: str, compiled: Compiled) -> Compiled:
        """Return `compiled`, or raise if keys name another build of the compiler."""
        library = self._library(name)
        if compiled.build != library.build:
            raise ToolchainChangedError(
                f"{library.title} is now build {compiled.build}, but keys contain {library.build}",
                hint="an upgrade was installed while this process was running",
            )
        return compiled

    def close(self) -> None:
        """End the worker processes that are idle. A later request starts new ones."""
        if self._pool is not None:
            self._pool.close()

    def after_fork(self) -> None:
        """Forget the workers of the parent process, in a forked child."""
        if self._pool is not None:
            self._pool.after_fork()


def own_roots(program: Program) -> dict[str, str]:
    """Return the include directories of a program by label, without the toolkit's.

    This needs no compiler.
    """
    if program.language != "cuda+link":
        return {str(index): directory for index, directory in enumerate(program.include)}
    assert isinstance(program, linked_program.LinkedProgram)
    return {
        f"{index}.{label}": directory
        for index, part in program.sources.items()
        for label, directory in own_roots(part).items()
    }
