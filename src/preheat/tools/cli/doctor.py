"""`preheat doctor`: check compilers, directories and settings, and suggest fixes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from preheat import native
from preheat._version import __version__
from preheat.build.builder import Builder
from preheat.build.opening import explain_shared
from preheat.build.seal import SEALED_BY
from preheat.errors import ConfigError, DeviceError, PreheatError, did_you_mean
from preheat.model.arch import Arch
from preheat.model.config import VARIABLES, Config, SealMode, environ
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.native.build import BUILD_AGAIN
from preheat.process.lazy import LazyModule
from preheat.process.progress import progress
from preheat.store.filesystem import filesystem_of
from preheat.store.remote.url import name_of
from preheat.store.signing.keys import Keys
from preheat.store.trust import unusable_reason
from preheat.toolchain.locate import Located
from preheat.tools.cli.findings import Finding, triton_findings
from preheat.tools.cli.output import (
    columns,
    count,
    duration,
    print_json,
    print_line,
    print_message,
    size,
)

if TYPE_CHECKING:
    from preheat.devices.cuda import device as cuda_device
    from preheat.tools.cli import remotes
else:
    cuda_device = LazyModule("preheat.devices.cuda.device")
    remotes = LazyModule("preheat.tools.cli.remotes")

__all__ = ["command"]

_PROBE = 'extern "C" __global__ void probe(int* x) { x[threadIdx.x] += 1; }'
# Headers that programs include most: a kernel that uses each, and the package it comes in.
_HEADERS = {
    "cuda_fp16.h": (
        "nvidia-cuda-runtime",
        "__global__ void probe(__half* x) { *x = __hadd(x[0], x[1]); }",
    ),
    "mma.h": (
        "nvidia-cuda-crt",
        "using Tile = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;\n"
        "__global__ void probe(float* x) { Tile tile; nvcuda::wmma::fill_fragment(tile, 1.0f);\n"
        "nvcuda::wmma::store_matrix_sync(x, tile, 16, nvcuda::wmma::mem_row_major); }",
    ),
    "cooperative_groups.h": (
        "nvidia-cuda-runtime",
        "__global__ void probe(int* x) { cooperative_groups::this_thread_block().sync(); *x = 1; }",
    ),
    "cub/block/block_reduce.cuh": (
        "nvidia-cuda-cccl",
        "__global__ void probe(int* x) { using Reduce = cub::BlockReduce<int, 32>;\n"
        "__shared__ Reduce::TempStorage room; *x = Reduce(room).Sum(*x); }",
    ),
}
_EMULATOR = (
    "compiling needs no GPU, and the emulator runs kernels on the CPU: preheat.device('emulator'), "
    "or PREHEAT_DEVICE=auto for the GPU where there is one"
)
_COMPILERS = {"nvrtc": "NVRTC", "nvJitLink": "nvJitLink"}
_NOT_NEEDED = "only kernels that preheat compiles need it, and those of Triton do not"
_MISSING = "cannot open source file"
#: Variables that `preheat audit`, `preheat run` and `preheat emulate` set for their commands.
_SET_BY_COMMANDS = ("PREHEAT_AUDIT", "PREHEAT_EMULATE_", SEALED_BY)
_SHARED = "other nodes share it: a lease among them decides who compiles, and locks are elsewhere"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(as_json: bool) -> int:
    """Check compilers, directories and settings, and suggest a fix for every problem.

    The command compiles small kernels that include cuda_fp16.h, mma.h, cooperative groups and CUB,
    which takes a few seconds. If Triton is installed, the command also checks its version and the C
    compiler for its host code. A line begins with ok, warn or fail, and a hint below the list names the
    remedy. The exit status is 1 if a line begins with fail.

    \b
    Examples:
      preheat doctor
      preheat doctor --json | jq '.[] | select(.verdict != "ok")'
    """
    findings = list(_findings())
    failed = sum(finding.verdict == "fail" for finding in findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return 1 if failed else 0
    for line in columns((f.verdict, f.what, f.detail) for f in findings):
        print_line(line)
    for finding in findings:
        if finding.fix:
            print_message(f"\nhint: {finding.what}: {finding.fix}")
    warned = sum(finding.verdict == "warn" for finding in findings)
    print_message(f"\n{count(failed, 'problem')}, {count(warned, 'warning')}")
    return 1 if failed else 0


def _findings() -> Iterator[Finding]:
    """Yield the results of all checks."""
    try:
        config = Config.from_env()
    except ConfigError:  # `_settings` reports it. Checks that depend on the settings are skipped.
        config = None
    yield from _versions()
    if config is not None:
        yield from _compilers(config)
        yield from triton_findings(config.sealed)
        yield from _keys(config)
        yield from _bundles(config)
    yield from _gpus()
    if config is not None:
        yield from _directories(config)
        if config.remote:
            yield from remotes.remote_findings(config)
    yield from _settings()


def _versions() -> Iterator[Finding]:
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding("preheat", "ok", __version__)
    yield Finding("Python", "ok", python)
    for package in ("cuda-bindings", "cuda-pathfinder", "xxhash"):
        try:
            yield Finding(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "fail", "not installed", f"pip install {package}")
    yield _native_core()


def _native_core() -> Finding:
    if native.core is not None:
        return Finding("native core", "ok", "in use")
    detail = f"not in use: {native.reason}; launches and replays take longer"
    if native.reason == native.SWITCHED_OFF:
        return Finding("native core", "ok", detail)
    fix = "install preheat again where there is a C compiler and Python.h, or set PREHEAT_NATIVE=0"
    if native.reason == native.STALE:
        fix = BUILD_AGAIN
    return Finding("native core", "warn", detail, fix)


def _settings() -> Iterator[Finding]:
    env = environ()
    for variable in VARIABLES:
        text = env.get(variable.name, "")
        if variable.name == "PREHEAT_REMOTE":  # A URL may have a password in it.
            text = " ".join(map(name_of, text.split()))
        try:
            variable.read(env)
        except ConfigError as error:
            yield Finding(variable.name, "fail", str(error), f"unset {variable.name} or correct it")
        else:
            yield Finding(variable.name, "ok", text or f"not set; {variable.default}")
    known = {variable.name for variable in VARIABLES}
    named = (name for name in env if name.startswith("PREHEAT_") and name not in known)
    for name in sorted(name for name in named if not name.startswith(_SET_BY_COMMANDS)):
        hint = did_you_mean(name, known) or "see docs/environment.md"
        yield Finding(name, "warn", "this variable is unknown", hint)


def _compilers(config: Config) -> Iterator[Finding]:
    try:
        builder = Builder.open(replace(config, remote=()), events=Events())
        located = builder.toolchain.located
    except PreheatError as error:
        yield Finding("compilers", "fail", str(error), error.hint or "")
        return
    for name, title in _COMPILERS.items():
        try:
            library = located.library(name)
        except PreheatError as error:
            yield _no_compiler(title, error, located, sealed=builder.sealed is SealMode.ERROR)
        else:
            detail = f"{library.version} at {library.path}, build {library.build[:12]}"
            yield Finding(title, "ok", detail)
    for label, directory in located.roots.items():
        yield Finding(f"{label} headers", "ok", directory)
    if not located.missing:
        yield from _linker_version(located)
        yield from _test_compiles(builder)
    builder.close()


def _no_compiler(title: str, error: PreheatError, located: Located, *, sealed: bool) -> Finding:
    """Return the finding for a compiler that is missing.

    A server with kernels of other libraries needs none, and a sealed process compiles nothing. One
    compiler without the other is a broken installation.
    """
    if sealed:
        return Finding(title, "ok", f"{error} (not needed, because the process is sealed)")
    if located.libraries:
        return Finding(title, "fail", str(error), error.hint or "")
    return Finding(title, "warn", f"{error}; {_NOT_NEEDED}", error.hint or "")


def _linker_version(located: Located) -> Iterator[Finding]:
    compiler, linker = (located.library(name).version for name in ("nvrtc", "nvJitLink"))
    if _number(linker) < _number(compiler):
        detail = f"nvJitLink {linker} is older than NVRTC {compiler}"
        yield Finding("versions", "warn", detail, "pip install -U nvidia-nvjitlink")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _test_compiles(builder: Builder) -> list[Finding]:
    """Compile a plain kernel and one for each of `_HEADERS`, without the cache."""
    checks = [lambda: _plain_compile(builder)]
    checks += [partial(_header_compile, builder, header) for header in _HEADERS]
    with progress("test compiles", len(checks)) as bar, ThreadPoolExecutor(os.cpu_count()) as threads:
        running = [threads.submit(check) for check in checks]
        for done in as_completed(running):
            bar.step(done.result().what)
    return [done.result() for done in running]


def _plain_compile(builder: Builder) -> Finding:
    archs = builder.toolchain.located.archs
    try:
        took = _seconds(builder, _PROBE)
    except PreheatError as error:
        return Finding("test compile", "fail", _reason(error), error.hint or "")
    known = f"sm_{archs[0]} to sm_{archs[-1]}"
    return Finding(
        "test compile", "ok", f"{took} with the start of the compiler process; it supports {known}"
    )


def _header_compile(builder: Builder, header: str) -> Finding:
    package, kernel = _HEADERS[header]
    try:
        took = _seconds(builder, f"#include <{header}>\n{kernel}")
        return Finding(header, "ok", f"compiled in {took}")
    except PreheatError as error:
        reason = _reason(error)
    fix = f"pip install {package}, or 'preheat[cu13]' for all headers; with a toolkit, set CUDA_HOME"
    if _MISSING not in reason:
        fix = "headers and compiler are of different releases: pip install -U 'preheat[cu13]'"
    return Finding(header, "warn", f"does not compile: {reason}", fix)


def _seconds(builder: Builder, source: str) -> str:
    """Compile `source` for the newest architecture and return the duration."""
    started = time.perf_counter()
    newest = Arch.parse(str(builder.toolchain.located.archs[-1]))
    builder.toolchain.compile(Program.of(source, label="doctor.cu"), newest)
    return duration(time.perf_counter() - started)


def _reason(error: PreheatError) -> str:
    """Return the first error of the compiler, or the first line of the message."""
    errors = [row for row in getattr(error, "rows", ()) if row.severity != "warning"]
    return f"{errors[0].file}: {errors[0].message}" if errors else str(error).partition("\n")[0]


def _keys(config: Config) -> Iterator[Finding]:
    """Check the files of keys of the settings."""
    if config.signing_key is None and not config.trusted_keys:
        return
    try:
        keys = Keys.load(config.signing_key, config.trusted_keys)
    except PreheatError as error:
        yield Finding("keys", "fail", str(error), error.hint or "correct the settings of keys")
        return
    if keys.signing is not None:
        yield Finding("signing key", "ok", f"{keys.signing.id.hex()} in {config.signing_key}")
    if keys.trusted is not None:
        yield Finding("trusted keys", "ok", ", ".join(key.id.hex() for key in keys.trusted.keys))


def _bundles(config: Config) -> Iterator[Finding]:
    """Check the bundles of the settings."""
    builder = Builder.open(replace(config, bundles=(), events=None, remote=()), events=Events())
    for path in config.bundles:
        try:
            bundle = builder.mount(path)
        except PreheatError as error:
            yield Finding("bundle", "fail", str(error), error.hint or "correct or unset PREHEAT_BUNDLE")
        else:
            archs, compilers = (", ".join(bundle.meta.get(w, ())) for w in ("archs", "toolchains"))
            yield Finding("bundle", "ok", f"{path}, for {archs}, by {compilers}")
    if config.sealed and not config.bundles:
        fix = "set PREHEAT_BUNDLE, or make sure that the cache has everything"
        yield Finding("seal", "warn", "sealed without a bundle", fix)


def _gpus() -> Iterator[Finding]:
    try:
        gpus = cuda_device.visible()
    except DeviceError as error:
        yield Finding("GPU", "warn", str(error).partition("\n")[0], _EMULATOR)
        return
    if not gpus:
        fix = f"check CUDA_VISIBLE_DEVICES; {_EMULATOR}"
        yield Finding("GPU", "warn", "there is a driver, but no GPU", fix)
    yield Finding("driver", "ok", f"CUDA {cuda_device.driver_version()}")
    for gpu in gpus:
        yield Finding(gpu.name, "ok", f"{gpu.model}, {gpu.arch}")


def _directories(config: Config) -> Iterator[Finding]:
    if not config.cache:
        yield Finding("cache directory", "warn", "the cache is off", "unset PREHEAT_CACHE")
    used = False
    for path in config.cache_dirs if config.cache else ():
        why = unusable_reason(path, trust=config.trust_cache_dir)
        if used:
            yield Finding("cache fallback", "ok", str(path))
        elif why is None:
            used = True
            yield _cache_directory(path, config)
        else:
            yield Finding(
                "cache directory", "warn", f"{path}: {why}", f"this directory is not used: {why}"
            )
    if config.cache and not used:
        yield Finding("cache directory", "fail", "no directory can be used", "set PREHEAT_CACHE_DIR")
    for path in config.layers:
        why = unusable_reason(path, trust=config.trust_cache_dir, write=False)
        if why:
            yield Finding("layer", "fail", f"{path}: {why}", "correct or unset PREHEAT_LAYERS")
        else:
            yield Finding("layer", "ok", str(path))
    if config.events is not None and not config.events.parent.is_dir():
        fix = f"create {config.events.parent} or correct PREHEAT_EVENTS"
        yield Finding("event file", "fail", f"{config.events} cannot be written", fix)
    yield _lock_directory(config)


def _cache_directory(path: Path, config: Config) -> Finding:
    free = shutil.disk_usage(path).free
    filesystem = filesystem_of(path)
    detail = f"{path} ({filesystem.kind}), {size(free)} free, limit {size(config.cache_limit)}"
    if filesystem.shared:
        detail += f"; {_SHARED}"
    if free < 100 << 20:
        return Finding(
            "cache directory", "warn", detail, "free some space, otherwise artifacts are not stored"
        )
    return Finding("cache directory", "ok", detail)


def _lock_directory(config: Config) -> Finding:
    path = config.lock_dir
    why = explain_shared(path) or unusable_reason(path, trust=config.trust_cache_dir)
    if why is None:
        return Finding("lock directory", "ok", f"{path} ({filesystem_of(path).kind})")
    fix = "set PREHEAT_LOCK_DIR to a private directory on a local disk"
    return Finding("lock directory", "warn", f"{path}: {why}", fix)
