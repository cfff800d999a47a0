"""Triton on the store of preheat: kernels, host code, tuning results, and baking without a GPU."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from preheat.adapters.base import Adapter, RequiredEntries, Row, not_importable, require_version
from preheat.adapters.modules import NotPortableError
from preheat.adapters.triton import coverage as variants
from preheat.adapters.triton import host, identity, request, tuning
from preheat.adapters.triton.rows import (
    changed_environment,
    changes,
    other_parameters,
    outdated,
    source_of,
)
from preheat.adapters.triton.state import MissedError, State, set_state, state
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.cache.lock import release_lost
from preheat.config import Config, SealMode
from preheat.errors import PreheatError
from preheat.foreign import ForeignRequest
from preheat.tracebacks import hide_frames

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

        set_state(State(builder.foreign))
        identity.install(builder.foreign)
        request.install()
        host.install()
        _release_locks()
        tuning.install()
        if Config.from_env().weak_kernels:
            _use_weak_kernels()
        knobs.autotuning.cache = True  # Otherwise each process measures every configuration.
        os.environ["TRITON_CACHE_MANAGER"] = _MANAGER

    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Compile the variants of a recorded launch for `arch` into the store."""
        from triton import compile as triton_compile
        from triton._C.libtriton import get_cache_invalidating_env_vars

        if reason := outdated(row):
            return RequiredEntries((), outdated=reason)
        for name in set(get_cache_invalidating_env_vars()) - set(row["env"]):
            del os.environ[name]  # It would enter the key, and was not set when the row was recorded.
        if tuning.is_tuned(row):
            return _tuned(row, arch)
        target = _target(arch)
        found: dict[str, ForeignRequest] = {}
        source, notes = _retraced(row)
        if reason := other_parameters(row, source.fn):
            return RequiredEntries((), outdated=reason)
        for each in _sources(row, source, target, coverage):
            with state().collecting() as used:
                kernel = triton_compile(each, target=target, options=dict(row["options"]))
                host.build_for(each, kernel.metadata)
            found |= {entry.digest: entry for entry in used}
        # With the versions of tools, a sealed process need not start the tools to ask for them.
        return RequiredEntries((*found.values(), *identity.tool_versions()), tuple(notes))

    def count(self, row: Row, coverage: str) -> int:
        """Return how many variants of a recorded launch are compiled, at most."""
        if coverage == "closure":
            return variants.closure_size(row, _retraced(row)[0].fn)
        return 1 + variants.WEAK if coverage == "weak" else 1

    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Return the entries of the kernels that `bake` compiles, and of the host code of those that
        are stored. Nothing is compiled.
        """
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler import compiler

        if reason := outdated(row):
            return RequiredEntries((), outdated=reason)
        if tuning.is_tuned(row):
            needed = _tuned(row, arch)
            return needed._replace(notes=(*needed.notes, *changed_environment(row)))
        target = _target(arch)
        backend = compiler.make_backend(target)
        source, notes = _retraced(row)
        if reason := other_parameters(row, source.fn):
            return RequiredEntries((), outdated=reason)
        env = get_cache_invalidating_env_vars()
        found: dict[str, ForeignRequest] = {}
        for each in _sources(row, source, target, coverage):
            options = backend.parse_options(dict(row["options"], **each.parse_options()))
            key = request.key_of(compiler.get_cache_key(each, backend, options, env))
            wanted = request.CompileRequest(each, backend, options, env, key).identity
            found[wanted.digest] = wanted
            found |= {entry.digest: entry for entry in _host_code(each, wanted)}
        return RequiredEntries(tuple(found.values()), (*notes, *changed_environment(row)))


def _host_code(source: Any, wanted: ForeignRequest) -> list[ForeignRequest]:
    """Return the entries of the host code of a kernel that is stored: its metadata is needed."""
    kernel = state().store.get(wanted)
    if kernel is None:
        return []
    (text,) = (content for name, content in kernel.files.items() if name.endswith(".json"))
    return host.requests_for(source, SimpleNamespace(**json.loads(text)))


def _target(arch: Arch) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch.major * 10 + arch.minor, 32)


def _retraced(row: Row) -> tuple[Any, list[str]]:
    try:
        source = source_of(row)
    except NotPortableError as error:
        raise not_importable(error, row) from error
    return source, changes(row, source.fn)


def _tuned(row: Row, arch: Arch) -> RequiredEntries:
    try:
        return tuning.required(row, arch)
    except NotPortableError as error:
        raise not_importable(error, row) from error


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
            return stock(*arguments, **options)
        except BaseException as error:
            release_lost()  # The call that took the lock has ended.
            if isinstance(error, PreheatError):
                hide_frames(error)
            raise

    identity.replace_everywhere("compile", stock, compile)


def _use_weak_kernels() -> None:
    """Let a sealed process launch a kernel that assumes less where the exact variant is missing."""
    from triton.runtime.jit import JITFunction

    stock: Callable[..., Any] = JITFunction._do_compile

    def _do_compile(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, *more: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        now = state()
        arguments = (self, key, signature, device, constexprs, options, *more)
        try:
            if now.store.sealed is SealMode.ERROR:
                with suppress(MissedError), now.allowing_weak():
                    return stock(*arguments, **named)
                kernel = _weak_kernel(self, signature, device, constexprs, options, more[0])
                if kernel is not None:
                    self.device_caches[device][0][key] = kernel
                    return kernel
            # In a sealed process, this raises the error with all details.
            return stock(*arguments, **named)
        except PreheatError as error:
            hide_frames(error)
            raise

    JITFunction._do_compile = _do_compile


def _weak_kernel(
    function: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any
) -> Any:
    """Return a stored kernel that serves the launch; None when there is none."""
    now = state()
    target = function.device_caches[device][2]
    exact = function.ASTSource(function, signature, constants, attributes)
    for source in variants.weaker(exact):
        try:
            with now.allowing_weak():
                kernel = function.compile(source, target=target, options=options.__dict__)
        except MissedError:
            continue
        name = f"{function.fn.__module__}:{function.fn.__qualname__}"
        variant = request.specialisation_text(exact)
        now.store.events.emit(
            "weak", program=f"triton {name}", caller=now.caller(), key=kernel.hash, variant=variant
        )
        return kernel
    return None
