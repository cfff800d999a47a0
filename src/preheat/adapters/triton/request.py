"""A compile that Triton requests: its arguments, its identity, and its description for people."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from preheat.adapters.base import LastKey, Row
from preheat.adapters.modules import module_name
from preheat.adapters.triton.identity import KIND
from preheat.adapters.triton.values import constants_digest
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignRequest
from preheat.process.lazy import LazyModule, lazy

if TYPE_CHECKING:
    from preheat.adapters.triton import rows
else:
    rows = LazyModule("preheat.adapters.triton.rows")  # It imports this module.

__all__ = [
    "CompileRequest", "install", "key_of", "request_of_call", "specialisation_text", "take_request",
    "variant_text",
]  # fmt: skip

_Arguments = tuple[Any, Any, Any, Mapping[str, str]]  # source, backend, options and environment
_last: LastKey[_Arguments] = LastKey()


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of one compile: the specialised source, backend, options and environment."""

    source: Any
    backend: Any
    options: Any
    env: Mapping[str, str]
    key: str  # as Triton gives it to its cache manager

    @lazy
    def identity(self) -> ForeignRequest:
        """The identity of the entry with the compiled kernel."""
        constants = getattr(self.source, "constants", {})  # A file of IR has none.
        return ForeignRequest(KIND, self.key, constants_digest(constants), self.label, self.arch)

    @property
    def arch(self) -> Arch:
        """The architecture of the code."""
        return Arch.parse(f"sm_{self.backend.target.arch}")

    @property
    def label(self) -> str:
        """`module:qualname` of the function, or the name of the file of IR."""
        function = getattr(getattr(self.source, "fn", None), "fn", None)
        if function is None:
            return str(self.source.name)
        name: str = f"{module_name(function)}:{function.__qualname__}"
        return name

    @lazy
    def properties(self) -> dict[str, str]:
        """What people compare: each argument with its type and what is assumed of it, and options."""
        return {**dict(_arguments(self.source)), **dict(_options(self)), **_environment(self.env)}

    def row(self) -> Row | None:
        """Return what a manifest keeps of the request."""
        return rows.row_of(self)


def _arguments(source: Any) -> Iterator[tuple[str, str]]:
    function = getattr(source, "fn", None)
    if function is None:
        return
    for index, name in enumerate(function.arg_names):
        kind = source.signature.get(name)
        constant = source.constants.get((index,))
        if kind == "constexpr":
            yield name, f"constant {getattr(constant, 'value', constant)!s:.60}"
        else:
            assumed = "".join(
                f", {_assumption(each)}" for each in source.attrs.get((index,), None) or ()
            )
            yield name, f"{kind}{assumed}"


def _assumption(attribute: Any) -> str:
    """Return an attribute of an argument as text, such as `divisible by 16`."""
    if isinstance(attribute, list | tuple) and attribute[0] == "tt.divisibility":
        return f"divisible by {attribute[1]}"
    return str(attribute)


def _options(request: CompileRequest) -> Iterator[tuple[str, str]]:
    for name, value in rows.chosen_options(request).items():
        yield name, str(value)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {f"${name}": value for name, value in sorted(env.items())}


def specialisation_text(source: Any) -> str:
    """Return the arguments of a kernel with their types and what is assumed of them, on one line."""
    return variant_text(dict(_arguments(source)))


def variant_text(properties: Mapping[str, str]) -> str:
    """Return the properties of a kernel on one line."""
    return ", ".join(f"{name}: {value}" for name, value in properties.items())


def install() -> None:
    """Remember the arguments of each compile of a thread when Triton computes its key."""
    from triton.compiler import compiler

    stock: Callable[..., str] = compiler.get_cache_key

    def get_cache_key(src: Any, backend: Any, backend_options: Any, env_vars: Any) -> str:
        key = stock(src, backend, backend_options, env_vars)
        _last.remember(key_of(key), (src, backend, backend_options, env_vars))
        return key

    compiler.get_cache_key = get_cache_key


def take_request(key: str) -> CompileRequest | None:
    """Return the compile for which this thread computed its last key; None if `key` is another key.

    `key` is the key of the cache manager that Triton makes next. A second call returns None.
    """
    from triton import knobs

    known = _last.request_of(key)
    last = _last.forget()
    # A hook of the user may add to the key after it was computed.
    changed = getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None
    arguments = last if changed else known
    return None if arguments is None else CompileRequest(*arguments, key)


def request_of_call(call: FrameType | None, key: str) -> CompileRequest | None:
    """Return the request of a call of Triton's `compile`, whose frame is `call`; otherwise None.

    A process that finds the cache manager only through its environment has computed its first key
    before the adapter is installed.
    """
    if call is None or call.f_code.co_name != "compile":
        return None
    known = call.f_locals
    if not {"src", "backend", "options", "env_vars"} <= {*known}:
        return None
    return CompileRequest(known["src"], known["backend"], known["options"], known["env_vars"], key)


def key_of(text: str) -> str:
    """Return the key that Triton gives to its cache manager for the text of a key."""
    digest = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(digest).decode().rstrip("=")
