"""Settings: the only module that reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from preheat.errors import ConfigError, InputError
from preheat.model.setting_values import (
    Address,
    address,
    boolean,
    bundles,
    choice,
    count,
    directories,
    directory,
    positive_seconds,
    seconds,
    shown_url,
    size,
    urls,
    word,
)

__all__ = [
    "VARIABLES",
    "Address",
    "Config",
    "SealMode",
    "Variable",
    "environ",
    "node_local_lock_dirs",
    "set_default_variable",
    "shown_url",
]


class SealMode(IntEnum):
    """The effect of a seal on a compile: none, a warning, or a `SealedError`."""

    OFF = 0
    WARN = 1
    ERROR = 2

    @classmethod
    def of(cls, text: str | SealMode) -> SealMode:
        """Parse `"warn"` or `"error"`. Any other text is an `InputError`."""
        if isinstance(text, SealMode):
            return text
        if text not in ("warn", "error"):
            raise InputError(f"a seal is 'error' or 'warn', not {text!r}")
        return cls.WARN if text == "warn" else cls.ERROR


class Variable(NamedTuple):
    """One environment variable: its name, its parser, a description of its default, and its effect."""

    name: str
    parse: Callable[[str, str], Any]
    default: str
    help: str

    def read(self, env: Mapping[str, str]) -> Any:
        """Return the value, or None when it is unset or empty. An invalid value is a `ConfigError`."""
        text = env.get(self.name, "")
        return self.parse(self.name, text) if text.strip() else None


def parse_seal(name: str, text: str) -> SealMode:
    """Parse a switch, or `warn`."""
    if text.strip().lower() == "warn":
        return SealMode.WARN
    try:
        return SealMode.ERROR if boolean(name, text) else SealMode.OFF
    except ConfigError:
        raise ConfigError(name, text, "a switch: use 1 or 0 (true, yes, on, …), or warn") from None


#: Every variable that preheat reads, in the order of docs/environment.md.
VARIABLES: tuple[Variable, ...] = (
    Variable(
        "PREHEAT_CACHE_DIR", directory, "the user's cache directory", "The directory of the cache."
    ),
    Variable("PREHEAT_CACHE", boolean, "on", "If off, the cache is in memory only."),
    Variable(
        "PREHEAT_CACHE_LIMIT",
        size,
        "8GiB",
        "The largest size of the cache on disk. Entries are evicted to stay below it.",
    ),
    Variable(
        "PREHEAT_CACHE_FILES",
        count,
        "100000",
        "The largest number of files of the cache on disk. Entries are evicted to stay below it.",
    ),
    Variable("PREHEAT_MEMORY_LIMIT", size, "256MiB", "The largest size in the memory of each process."),
    Variable(
        "PREHEAT_LAYERS",
        directories,
        "none",
        "Read-only cache directories, separated like `PATH`, searched before the writable one.",
    ),
    Variable(
        "PREHEAT_BUNDLE",
        bundles,
        "none",
        "Baked bundles, each as `FILE` or `FILE@sha256:…`, separated like `PATH`. They are searched "
        "before everything else.",
    ),
    Variable(
        "PREHEAT_SEALED",
        parse_seal,
        "off",
        "If on, a request that needs a compile is an error. With `warn`, it is a warning.",
    ),
    Variable(
        "PREHEAT_SEALED_HEADERS",
        choice("error", "warn", "ignore"),
        "error",
        "What a sealed process does if a header file of the program is not the one that its bundle was "
        "baked from: `error`, `warn` (it uses the bundle, and warns), or `ignore` (it compares none).",
    ),
    Variable(
        "PREHEAT_RECORD",
        directory,
        "none",
        "A manifest. Every program that the process requests is added to it, if it imports preheat.",
    ),
    Variable(
        "PREHEAT_TRUST_CACHE_DIR",
        boolean,
        "off",
        "If on, a cache directory may belong to other users, or be writable by them.",
    ),
    Variable(
        "PREHEAT_REMOTE",
        urls,
        "none",
        "URLs of shared stores, separated by spaces. They are searched last, in this order.",
    ),
    Variable(
        "PREHEAT_REMOTE_TIMEOUT",
        positive_seconds,
        "2",
        "The longest time of one request to a shared store, in seconds.",
    ),
    Variable(
        "PREHEAT_REMOTE_UNSIGNED",
        boolean,
        "off",
        "If on, entries of a shared store are used even if no trusted key has signed "
        "them, and none is signed.",
    ),
    Variable(
        "PREHEAT_SIGNING_KEY",
        directory,
        "none",
        "The file of the private key that signs bundles, and entries of shared stores.",
    ),
    Variable(
        "PREHEAT_TRUSTED_KEYS",
        directories,
        "none",
        "Files of public keys, separated like `PATH`. Signatures of these keys are accepted.",
    ),
    Variable(
        "PREHEAT_REQUIRE_SIGNED",
        boolean,
        "off",
        "If on, a bundle is used only if a trusted key has signed it, or if its name has a pin.",
    ),
    Variable(
        "PREHEAT_LOCK_DIR",
        directory,
        "a private directory on this node",
        "The directory of the locks between processes. It must be local to the node.",
    ),
    Variable(
        "PREHEAT_LOCK_WAIT",
        seconds,
        "300",
        "The longest wait for another process or host that compiles the same program, in seconds.",
    ),
    Variable(
        "PREHEAT_COMPILE_TIMEOUT", seconds, "1200", "The longest time of one compile, in seconds."
    ),
    Variable(
        "PREHEAT_DEVICE",
        word,
        "cuda",
        'The device that `preheat.device()` and `preheat.device("auto")` open: `cuda`, `cuda:1`, '
        "`emulator`, or `auto` (the GPU if there is one, otherwise the emulator).",
    ),
    Variable(
        "PREHEAT_EMULATOR_SANITIZE",
        boolean,
        "off",
        "If on, the emulator stops a kernel that uses an undefined value, or passes a barrier that not "
        "all threads of its block reach.",
    ),
    Variable(
        "PREHEAT_BLOCKING",
        boolean,
        "off",
        "If on, preheat waits after every launch, so that an error names the kernel that caused it.",
    ),
    Variable(
        "PREHEAT_JIT",
        boolean,
        "off",
        "If on, the driver compiles PTX at every start for a GPU that is newer than the compiler.",
    ),
    Variable(
        "PREHEAT_RELOAD", boolean, "on", "If off, changes to the files of a loaded program are ignored."
    ),
    Variable(
        "PREHEAT_GRAPH_PROFILE",
        boolean,
        "off",
        "If on, the times of sampled graph replays are written as JSON lines, to the file of "
        "`PREHEAT_EVENTS` or to standard error.",
    ),
    Variable(
        "PREHEAT_GRAPH_SYNC",
        boolean,
        "off",
        "If on, preheat waits after every replay, so that an error names the graph that caused it.",
    ),
    Variable(
        "PREHEAT_ADAPTERS",
        word,
        "none",
        "Libraries whose compilers use the cache as soon as preheat is imported, or `auto` for all.",
    ),
    Variable(
        "PREHEAT_WEAK_KERNELS",
        boolean,
        "on",
        "If off, a sealed process does not use Triton kernels that assume less about their arguments "
        "than the launch would allow.",
    ),
    Variable(
        "PREHEAT_NATIVE",
        boolean,
        "on",
        "If off, Python code does launches and replays, instead of the native core.",
    ),
    Variable(
        "PREHEAT_EVENTS",
        directory,
        "none",
        "A file to which every event is appended, as one JSON object on a line.",
    ),
    Variable(
        "PREHEAT_METRICS",
        address,
        "none",
        "The address, as `host:port` or `:port`, at which this process serves its counters to "
        "Prometheus under `/metrics`.",
    ),
    Variable(
        "PREHEAT_OTEL",
        boolean,
        "off",
        "If on, counters and compiles are sent to OpenTelemetry, as the program has configured it.",
    ),
    Variable(
        "PREHEAT_TRACEBACK",
        choice("short", "full"),
        "short",
        "With `full`, tracebacks have all frames of preheat, not only the function that was called.",
    ),
)
_BY_SETTING = {variable.name.removeprefix("PREHEAT_").lower(): variable for variable in VARIABLES}


def environ() -> Mapping[str, str]:
    """Return the environment of the process, for code that starts other processes."""
    return os.environ


def set_default_variable(name: str, value: str) -> None:
    """Set a variable of another library, which its processes inherit, unless it is set."""
    os.environ.setdefault(name, value)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, one attribute for each variable of the environment.

    Attributes:
        cache_dirs: Candidates for the directory of the cache. The first usable one is used.
        device: The device that `PREHEAT_DEVICE` names, or None.

    Examples:
        >>> config = preheat.Config.from_env({"HOME": "/home/me", "PREHEAT_CACHE_LIMIT": "1GiB"})
        >>> config.cache_limit
        1073741824
        >>> builder = preheat.Builder.open(preheat.Config.from_env())
    """

    cache_dirs: tuple[Path, ...]
    lock_dir: Path
    cache: bool = True
    cache_limit: int = 8 << 30
    cache_files: int = 100_000
    memory_limit: int = 256 << 20
    layers: tuple[Path, ...] = ()
    bundles: tuple[Path, ...] = ()
    sealed: SealMode = SealMode.OFF
    sealed_headers: str = "error"
    record: Path | None = None
    trust_cache_dir: bool = False
    remote: tuple[str, ...] = field(default=(), repr=False)  # A URL may have a password in it.
    remote_timeout: float = 2.0
    remote_unsigned: bool = False
    signing_key: Path | None = None
    trusted_keys: tuple[Path, ...] = ()
    require_signed: bool = False
    lock_wait: float = 300.0
    compile_timeout: float = 1200.0
    device: str | None = None
    emulator_sanitize: bool = False
    blocking: bool = False
    jit: bool = False
    reload: bool = True
    graph_profile: bool = False
    graph_sync: bool = False
    events: Path | None = None
    metrics: Address | None = None
    otel: bool = False
    adapters: str = ""  # read when preheat is imported, before there is a Config
    weak_kernels: bool = True
    native: bool = True
    traceback: str = "short"

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] | None = None, *, cache_dir: str | os.PathLike[str] | None = None
    ) -> Config:
        """Read the settings from the environment.

        Args:
            env: The variables. The default is the environment of the process.
            cache_dir: The directory of the cache. If it cannot be used, the cache is only in memory.

        Raises:
            ConfigError: A variable has an invalid value.

        Examples:
            >>> preheat.Config.from_env({"PREHEAT_SEALED": "maybe"})
            Traceback (most recent call last):
            preheat.errors.ConfigError: PREHEAT_SEALED='maybe' is not ...
        """
        env = environ() if env is None else env
        if cache_dir is not None:
            return replace(cls.from_env(env), cache_dirs=(_given_directory(cache_dir),))

        values = {
            name: value
            for name, variable in _BY_SETTING.items()
            if (value := variable.read(env)) is not None
        }
        chosen = values.pop("cache_dir", None)
        mine = f"preheat-{os.getuid()}"
        values.setdefault("lock_dir", node_local_lock_dirs()[0])
        return cls(
            cache_dirs=(
                *([chosen] if chosen else []),
                *_user_cache_dirs(env),
                _temporary(env) / mine / "cache",
            ),
            bundles=values.pop("bundle", ()),
            **values,
        )


def node_local_lock_dirs() -> list[Path]:
    """Return directories for locks that all processes of this node share, whatever their TMPDIR is."""
    places = ["/dev/shm", "/tmp"] if os.path.isdir("/dev/shm") else ["/tmp"]
    return [Path(place) / f"preheat-{os.getuid()}" / "locks" for place in places]


def _given_directory(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise InputError(f"cache_dir must be a path, not {type(path).__name__}: {path!r}")
    if not text or "\0" in text:
        raise InputError(f"cache_dir {text!r} is not a path")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _user_cache_dirs(env: Mapping[str, str]) -> list[Path]:
    """Return `$XDG_CACHE_HOME` and the cache directory of the platform, each only if it is absolute."""
    places = [env.get("XDG_CACHE_HOME", "")]
    if home := env.get("HOME", ""):
        places.append(f"{home}/{'Library/Caches' if sys.platform == 'darwin' else '.cache'}")
    return [Path(place) / "preheat" for place in places if os.path.isabs(place)]


def _temporary(env: Mapping[str, str]) -> Path:
    place = env.get("TMPDIR", "")
    return Path(place if os.path.isabs(place) else "/tmp")
