"""Host code of Triton: C extensions that it compiles for each process or each signature.

Triton's key of these holds directories of the machine. Here the key is the content of the source, the
interface of Python and the machine type, so an extension that was built without a driver is found where
there is one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from preheat.adapters.base import HiddenFrames
from preheat.adapters.triton.identity import KIND
from preheat.adapters.triton.state import state
from preheat.errors import ToolchainNotFoundError
from preheat.model.foreign import ForeignRequest

__all__ = ["build", "build_for", "install", "requests_for"]

_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
_OWN = ("cuda_utils", "__triton_launcher")  # the extensions of Triton itself
_STUB = "int cuInit(unsigned flags) { (void)flags; return 999; }\n"


def install() -> None:
    """Answer requests for Triton's own extensions. Those of others are built as before."""
    from triton import knobs
    from triton.runtime import build as triton_build

    stock: Callable[..., str] = triton_build._build

    def _build(name: str, src: str, srcdir: str, *arguments: Any, **options: Any) -> str:
        if name not in _OWN or knobs.build.impl is not None:
            return stock(name, src, srcdir, *arguments, **options)
        with HiddenFrames():
            return build(name, src, srcdir, *arguments, **options)

    triton_build._build = _build


def build(
    name: str,
    src: str,
    srcdir: str,
    library_dirs: list[str],
    include_dirs: list[str],
    libraries: list[str],
    ccflags: list[str] | None = None,
    *_: object,
    **__: object,
) -> str:
    """Return the path of the extension that is made from the file `src`, compiled at most once."""
    flags = list(ccflags or ())
    request = _request(name, Path(src).read_bytes(), libraries, flags)

    def make() -> Mapping[str, bytes]:
        return {name: _compile(name, src, [srcdir, *include_dirs], library_dirs, libraries, flags)}

    connection = state().connection
    entry = connection.store.obtain(request, make, called_by=connection.caller)
    state().report(entry)
    path = os.path.join(srcdir, name + _SUFFIX)
    Path(path).write_bytes(entry.files[name])
    return path


def _request(
    name: str, source: bytes, libraries: Sequence[str], flags: Sequence[str] = ()
) -> ForeignRequest:
    """Return the entry of an extension."""
    interface = "\0".join((name, _SUFFIX, platform.machine(), *libraries, *flags))
    key = hashlib.sha256(interface.encode() + b"\0" + source).hexdigest()
    return ForeignRequest(KIND, f"host/{key}", label=f"host code {name}")


def _compile(
    name: str,
    src: str,
    include_dirs: list[str],
    library_dirs: list[str],
    libraries: list[str],
    flags: list[str],
) -> bytes:
    from triton import knobs

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ToolchainNotFoundError(
            f"Triton's host code {name} needs a C compiler", hint="install gcc, or set CC"
        )
    with tempfile.TemporaryDirectory() as place:
        output = os.path.join(place, name + _SUFFIX)
        include = [*filter(None, include_dirs), _python_headers(), *knobs.build.backend_dirs]
        _run(
            name,
            [
                *(*compiler.split(), src, "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", output),
                *(f"-I{directory}" for directory in include),
                *(f"-L{directory}" for directory in (*library_dirs, _stub_directory(place, compiler))),
                "-Wl,--no-as-needed",  # The library to link against may lack the functions.
                *(f"-l:{each}" if ".so" in each else f"-l{each}" for each in libraries),
                *flags,
            ],
        )
        return Path(output).read_bytes()


def _run(name: str, command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise ToolchainNotFoundError(
            f"Triton's host code {name} could not be compiled:\n{ran.stderr.strip()}",
            hint="install the header files of Python, or set CC to another compiler",
        )


def _python_headers() -> str:
    """Return the directory of `Python.h`. Debian's default scheme names another one."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _stub_directory(place: str, compiler: str) -> str:
    """Return a directory with a library to link against if there is no driver."""
    source = Path(place, "stub.c")
    source.write_text(_STUB)
    library = os.path.join(place, "libcuda.so.1")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library]
    _run("stub", [*compiler.split(), str(source), *options])
    os.symlink("libcuda.so.1", os.path.join(place, "libcuda.so"))
    return place


def build_for(source: Any, metadata: Any) -> None:
    """Build the host code that a launch of a kernel needs, without a driver."""
    from triton.backends.nvidia import driver

    with tempfile.TemporaryDirectory() as place:
        for name, text in _extensions(source, metadata):
            path = Path(place, f"{name}.c")
            path.write_bytes(text)
            build(name, str(path), place, [], list(driver.include_dirs), list(driver.libraries))


def requests_for(source: Any, metadata: Any) -> list[ForeignRequest]:
    """Return the entries of the host code that a launch of a kernel needs."""
    from triton.backends.nvidia import driver

    return [_request(name, text, driver.libraries) for name, text in _extensions(source, metadata)]


def _extensions(source: Any, metadata: Any) -> Iterator[tuple[str, bytes]]:
    """Yield name and source of each extension that a launch of a kernel needs."""
    from triton.backends.nvidia import driver

    yield "cuda_utils", Path(driver.__file__).with_name("driver.c").read_bytes()
    if hasattr(driver, "make_launcher"):  # until Triton 3.6: one extension for each signature
        tensordesc = getattr(metadata, "tensordesc_meta", None)
        text: str = driver.make_launcher(source.constants, dict(source.signature), tensordesc)
        yield "__triton_launcher", text.encode()
