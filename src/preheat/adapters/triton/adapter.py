"""Triton on the store of preheat: kernels, host code, tuning results, and baking without a GPU."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from preheat.adapters.base import (
    Adapter,
    Connection,
    HiddenFrames,
    RequiredEntries,
    Row,
    changed_environment,
    not_importable,
    require_version,
)
from preheat.adapters.modules import NotPortableError
from preheat.adapters.triton import coverage as variants
from preheat.adapters.triton import host, identity, request, tuning
from preheat.adapters.triton.directory import KernelDirectory
from preheat.adapters.triton.rows import changes, other_parameters, outdated, source_of
from preheat.adapters.triton.state import MissedError, State, Work, set_state, state
from preheat.build.builder import Builder
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.foreign import ForeignRequest
from preheat.store.lock import release_lost

__all__ = ["TritonAdapter"]

_OLDEST, _NEWEST = (3, 6), (3, 9)  # of the versions that the adapter accepts; both are tested
_MANAGER = "preheat.adapters.triton.manager:CacheManager"


class TritonAdapter(Adapter):
    """Replaces Triton's cache manager, and what it computes about itself in every process."""

    name = "triton"
    module = "triton"

    def install(self, builder: Builder) -> None:
        """Connect Triton. The variable of its cache manager reaches worker and child processes."""
        import triton

        require_version("Triton", triton.__version__, _OLDEST, _NEWEST)
        from triton import knobs

        connection = Connection(builder.foreign, triton)
        config = Config.from_env()
        directory = KernelDirectory(connection.store.events, trust=config.trust_cache_dir)
        set_state(State(connection, Work(), directory))
        identity.install(builder.foreign)
        request.install()
        host.install()
        _release_locks()
        tuning.install()
        if config.weak_kernels:
            _use_weak_kernels()
        knobs.autotuning.cache = True  # Otherwise each process measures every configuration.
        os.environ["TRITON_CACHE_MANAGER"] = _MANAGER

    def required(self, row: Row, arch: Arch, coverage: str, *, make: bool) -> RequiredEntries:
        """Return the entries of the variants of a recorded launch for `arch`, and compile them."""
        from triton._C.libtriton import get_cache_invalidating_env_vars

        if reason := outdated(row):
            return RequiredEntries((), outdated=reason)
        env = get_cache_invalidating_env_vars()
        if make:
            for name in {*env} - {*row["env"]}:
                del os.environ[name]  # It would enter the key, and was not set in the recording.
        environment = () if make else changed_environment(row, env)
        try:
            if tuning.is_tuned(row):
                needed = tuning.required(row, arch)
                return needed._replace(notes=(*needed.notes, *environment))
            source = source_of(row)
        except NotPortableError as error:
            raise not_importable(error, row) from error
        if reason := other_parameters(row, source.fn):
            return RequiredEntries((), outdated=reason)
        target = _target(arch)
        entries_of = _compile if make else _entries_of
        found: dict[str, ForeignRequest] = {}
        for each in _sources(row, source, target, coverage):
            found |= {entry.digest: entry for entry in entries_of(row, each, target)}
        # With the versions of tools, a sealed process need not start the tools to ask for them.
        tools = identity.tool_versions() if make else []
        return RequiredEntries((*found.values(), *tools), (*changes(row, source.fn), *environment))

    def count(self, row: Row, coverage: str) -> int:
        """Return how many variants of a recorded launch are compiled, at most."""
        if coverage == "closure":
            try:
                return variants.closure_size(row, source_of(row).fn)
            except NotPortableError as error:
                raise not_importable(error, row) from error
        return 1 + variants.WEAK if coverage == "weak" else 1


def _compile(row: Row, source: Any, target: Any) -> list[ForeignRequest]:
    """Compile a variant into the store, with its host code, and return the entries."""
    from triton import compile as triton_compile

    used: list[ForeignRequest] = []
    with state().work.setting(collected=used):
        kernel = triton_compile(source, target=target, options=dict(row["options"]))
        host.build_for(source, kernel.metadata)
    return used


def _entries_of(row: Row, source: Any, target: Any) -> list[ForeignRequest]:
    """Return the entry of a variant, and the entries of its host code if the kernel is stored."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import compiler

    env = get_cache_invalidating_env_vars()
    backend = compiler.make_backend(target)
    options = backend.parse_options(dict(row["options"], **source.parse_options()))
    key = request.key_of(compiler.get_cache_key(source, backend, options, env))
    wanted = request.CompileRequest(source, backend, options, env, key).identity
    return [wanted, *_host_code(source, wanted)]


def _host_code(source: Any, wanted: ForeignRequest) -> list[ForeignRequest]:
    """Return the entries of the host code of a kernel that is stored: its metadata is needed."""
    kernel = state().connection.store.get(wanted)
    if kernel is None:
        return []
    (text,) = (content for name, content in kernel.files.items() if name.endswith(".json"))
    return host.requests_for(source, SimpleNamespace(**json.loads(text)))


def _target(arch: Arch) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch.major * 10 + arch.minor, 32)


def _sources(row: Row, source: Any, target: Any, coverage: str) -> Iterator[Any]:
    """Yield the variants to compile: the recorded one first, and each once."""
    from triton.compiler.compiler import make_backend

    yield source
    seen = {source.hash()}
    more: Iterator[Any] = iter(())
    if coverage == "closure":
        more = variants.closure(row, source.fn, make_backend(target))
    elif coverage == "weak":
        more = variants.weaker(source)
    for each in more:
        if each.hash() not in seen:
            seen.add(each.hash())
            yield each


def _release_locks() -> None:
    """Let a compile that fails give up its lock at once, so that no other process waits for it."""
    from triton.compiler import compiler

    stock: Callable[..., Any] = compiler.compile

    @functools.wraps(stock)
    def compile(*arguments: Any, **options: Any) -> Any:
        try:
            with HiddenFrames():
                return stock(*arguments, **options)
        except BaseException:
            release_lost()  # The call that took the lock has ended.
            raise

    identity.replace_in_triton("compile", stock, compile)


def _use_weak_kernels() -> None:
    """Let a sealed process launch a kernel that assumes less where the exact variant is missing."""
    from triton.runtime.jit import JITFunction

    stock: Callable[..., Any] = JITFunction._do_compile

    def _do_compile(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, *more: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        connection, work, _ = state()
        arguments = (self, key, signature, device, constexprs, options, *more)
        with HiddenFrames():
            if connection.store.sealed is SealMode.ERROR:
                with suppress(MissedError), work.setting(weak_allowed=True):
                    return stock(*arguments, **named)
                kernel = _weak_kernel(self, signature, device, constexprs, options, more[0])
                if kernel is not None:
                    self.device_caches[device][0][key] = kernel
                    return kernel
            # In a sealed process, this raises the error with all details.
            return stock(*arguments, **named)

    JITFunction._do_compile = _do_compile


def _weak_kernel(
    function: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any
) -> Any:
    """Return a stored kernel that serves the launch; None when there is none."""
    connection, work, _ = state()
    target = function.device_caches[device][2]
    exact = function.ASTSource(function, signature, constants, attributes)
    for source in variants.weaker(exact):
        try:
            with work.setting(weak_allowed=True):
                kernel = function.compile(source, target=target, options=options.__dict__)
        except MissedError:
            continue
        name = f"{function.fn.__module__}:{function.fn.__qualname__}"
        variant = request.specialisation_text(exact)
        connection.store.events.emit(
            "weak",
            program=f"triton {name}",
            caller=connection.caller(),
            key=kernel.hash,
            variant=variant,
        )
        return kernel
    return None
