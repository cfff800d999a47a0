"""The bundles that are mounted, what they hold for a request, and the architectures of their code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from preheat.build.request import TargetDevice
from preheat.errors import BundleError, InputError, with_others
from preheat.model import codec
from preheat.model.arch import Arch, runnable_archs
from preheat.model.artifact import Artifact, Provenance
from preheat.model.codec import text
from preheat.model.config import SealMode
from preheat.model.events import Events
from preheat.model.foreign import ForeignEntry, foreign_kind
from preheat.model.key import Part, include_parts
from preheat.model.setting_values import split_pin
from preheat.process.callsite import shown_path
from preheat.process.lazy import LazyModule
from preheat.toolchain.headers.states import HeaderState, Place, decode_states, encode_states

if TYPE_CHECKING:
    import shlex

    from preheat.store import bundle as bundle_file
    from preheat.store.bundle import Bundle
    from preheat.store.signing.keys import Keyring
else:
    bundle_file = LazyModule("preheat.store.bundle")  # Only a process that mounts a bundle needs it.
    shlex = LazyModule("shlex")  # Only a message needs it.

__all__ = [
    "DAMAGED_ENTRY",
    "BundleEntry",
    "MountedBundles",
    "bake_command",
    "baked_archs",
    "code_keys",
    "decode_entry",
    "entries_of",
    "entry_meta",
    "foreign_of",
    "named",
    "read",
    "read_foreign",
    "require_code",
    "runs",
]

InUse = Mapping[str, Artifact]  # artifacts by digest
_NONE: InUse = MappingProxyType({})
#: The beginning of the reason for an entry whose checksum is wrong.
DAMAGED_ENTRY = "damaged: the entry in"
_COPY_AGAIN = "copy the file to this place again, or correct PREHEAT_BUNDLE"
# This word is in every bundle, so it cannot change. The artifacts in a bundle have another kind.
_ENTRY_KIND = "promise"


@dataclass(frozen=True)
class BundleEntry:
    """The artifact that a bundle holds for one request, and the header files it was compiled from.

    `key` is the digest of the `bundle_key` of the request. `entries` are the kernels that the manifest
    names. `untracked_reason` says why no cache can store the artifact, or is empty. `include` has the
    include directories of the request as portable paths, which `artifact` does not contain. It is empty
    for a program that includes no file, and None in a bundle that was baked before include directories
    were part of requests. `sources` has the `long_texts` of the program, if they are baked. `toolkit`
    has the `toolkit_places` in its include directories.
    """

    key: str
    artifact: Artifact
    state: HeaderState
    entries: tuple[str, ...] = ()
    untracked_reason: str = ""
    include: tuple[str, ...] | None = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    toolkit: tuple[Place, ...] = ()

    @property
    def request(self) -> tuple[Part, ...]:
        """The parts of the request, and the compiler that compiled it."""
        named = (Part.of(*part) for part in include_parts(self.include or ()))
        return (*self.artifact.parts, *named)

    def encode(self) -> dict[str, bytes]:
        """Return the blobs of a bundle by digest. They do not depend on where or when it was compiled.

        They contain no source texts but `sources`, because bundles are given to others, and run without
        sources.
        """
        artifact = replace(self.artifact, provenance=Provenance(), sources={})
        meta: dict[str, Any] = {
            "kind": _ENTRY_KIND,
            "label": artifact.label,
            "arch": str(artifact.arch),
            "entries": self.entries,
            "note": self.untracked_reason,
            "include": None if self.include is None else [*map(_writable, self.include)],
            "states": encode_states([(self.state, artifact.digest)]),
        }
        if self.sources:
            meta["sources"] = dict(sorted(self.sources.items()))
        if self.toolkit:
            meta["toolkit"] = self.toolkit
        return {self.key: codec.pack(self.key, meta, {}), artifact.digest: artifact.encode()}


def _writable(spelling: str) -> str:
    """Return a portable path for JSON: bytes of a name that are not text are escaped."""
    return spelling.encode(errors="backslashreplace").decode()


def read(bundle: Bundle, key: str, in_use: InUse = _NONE) -> BundleEntry | None:
    """Return the entry of `bundle` for the request `key`; `DamagedEntryError` when it cannot be read.

    An artifact that is `in_use`, by digest, is not decoded again.
    """
    meta = entry_meta(bundle, key)
    return None if meta is None else decode_entry(bundle, key, meta, in_use)


def entries_of(bundle: Bundle) -> Iterator[BundleEntry]:
    """Yield all entries of `bundle`, by key; `DamagedEntryError` when one cannot be read."""
    for digest in bundle.digests():
        entry = read(bundle, digest)
        if entry is not None:
            yield entry


def foreign_of(bundle: Bundle) -> Iterator[ForeignEntry]:
    """Yield the entries of other libraries, by digest; `DamagedEntryError` when one cannot be read."""
    for digest in bundle.digests():
        entry = read_foreign(bundle, digest)
        if entry is not None:
            yield entry


def read_foreign(bundle: Bundle, digest: str) -> ForeignEntry | None:
    """Return the entry of another library under `digest`; None when it is another kind of entry."""
    blob = bundle.get(digest)
    if blob is None or foreign_kind(blob) is None:
        return None
    return ForeignEntry.decode(digest, *codec.unpack_checked(blob))


def code_keys(bundle: Bundle) -> dict[str, str]:
    """Return the digest of the artifact of every entry that can be read, by the digest of the entry."""
    codes: dict[str, str] = {}
    for digest in bundle.digests():
        with suppress(codec.DamagedEntryError, OSError):
            meta = entry_meta(bundle, digest)
            for _, code in () if meta is None else decode_states(meta):
                codes[digest] = code
    return codes


def entry_meta(bundle: Bundle, key: str) -> dict[str, Any] | None:
    """Return the metadata of an entry; None when there is none under `key`, or it is an artifact."""
    blob = bundle.get(key)
    meta = {} if blob is None else codec.unpack_checked(blob).meta
    return meta if meta.get("kind") == _ENTRY_KIND else None


def decode_entry(bundle: Bundle, key: str, meta: dict[str, Any], in_use: InUse = _NONE) -> BundleEntry:
    """Decode the entry that `meta` describes, with its artifact."""
    try:
        ((state, digest),) = decode_states(meta)
        entries = meta["entries"]
        untracked_reason = text(meta["note"])
        include = meta.get("include")
        if not isinstance(entries, list) or not isinstance(include, list | None):
            raise TypeError("its entries or include directories are not a list")
        sources = meta.get("sources", {})
        if not isinstance(sources, dict):
            raise TypeError("its sources are not a table")
        for each in (*entries, *(include or ()), *sources.values()):
            text(each)
        toolkit = tuple([(root, name) for root, name in codec.rows(meta.get("toolkit", []), 2)])
        artifact = in_use.get(digest) or _artifact(bundle, digest)
    except codec.DamagedEntryError:
        raise
    except (KeyError, TypeError, ValueError) as bad:
        raise codec.DamagedEntryError(f"not an entry of a bundle: {bad}") from None
    named = None if include is None else tuple(include)
    return BundleEntry(key, artifact, state, tuple(entries), untracked_reason, named, sources, toolkit)


def _artifact(bundle: Bundle, digest: str) -> Artifact:
    blob = bundle.get(digest)
    if blob is None:
        raise ValueError(f"its code {digest[:12]} is missing")
    return Artifact.stored(digest, blob)


class MountedBundles:
    """The mounted bundles, in the order in which they are searched.

    They are not stores of the chain, because their keys name no compiler. `rejected` has the error of
    every bundle in the settings that could not be mounted, by its path.
    """

    def __init__(
        self, events: Events, *, trust: bool, signers: Callable[[], Keyring] | None = None
    ) -> None:
        """`signers` returns the keys of which one must have signed each bundle that has no pin."""
        self._events = events
        self._trust = trust
        self._signers = signers
        self.mounted: dict[Path, Bundle] = {}
        # The digest of the artifact of each entry that was read, and its other fields. While the
        # artifact is in use, the entry is not read again.
        self._decoded: dict[tuple[Bundle, str], tuple[str, dict[str, Any]]] = {}
        self.rejected: dict[Path, BundleError] = {}
        self._devices: WeakKeyDictionary[TargetDevice, Arch] = (
            WeakKeyDictionary()
        )  # that use the bundles
        self._unsuited: set[tuple[Path, Arch]] = set()  # which were reported

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The mounted bundles."""
        return tuple(self.mounted.values())

    def __len__(self) -> int:
        return len(self.mounted)

    def mount(self, path: str | os.PathLike[str]) -> Bundle:
        """Mount the bundle at `path`; `BundleError` when it cannot be used.

        `path` may have a pin, as in `kernels.heat@sha256:…`. Mounting the same path twice is allowed;
        the second call picks up a replaced file.
        """
        source = Path(os.path.abspath(path))
        place, pin = split_pin(source)
        signers = self._required_signers(place) if pin is None else None
        opened = bundle_file.Bundle.open(source, trust=self._trust, signers=signers)
        self.rejected.pop(place, None)
        known = self.mounted.get(place)
        same = known is not None and known.stamp == opened.stamp and not known.closed
        if known is not None and same and (pin is None or known.source == source):
            return known
        self.mounted[place] = opened
        self._decoded = {key: row for key, row in self._decoded.items() if key[0] is not known}
        return opened

    def serve(self, device: TargetDevice) -> None:
        """Add a device that uses the bundles, for `report_unsuited`."""
        self._devices[device] = device.arch
        self.report_unsuited()

    def leave(self, device: TargetDevice) -> None:
        """Remove a device that has been closed."""
        self._devices.pop(device, None)

    def report_unsuited(self) -> None:
        """Emit an event for each bundle that has no code for a device, if no other bundle has some.

        Bundles of one architecture each may all be mounted on every machine.
        """
        archs: dict[Path, tuple[Arch, ...]] = {}
        for bundle in self.bundles if self._devices else ():
            with suppress(BundleError):  # An invalid list is an error where it is used.
                archs[bundle.path] = baked_archs(bundle)
        for device, arch in list(self._devices.items()):
            served = any(runs(arch, its) for its in archs.values())
            for path, its in () if served else archs.items():
                if its and (path, arch) not in self._unsuited:
                    self._unsuited.add((path, arch))
                    reason = f"it has code for {named(its)}, and {device.name} is {arch}"
                    self._events.emit("refused", path=str(path), reason=reason)

    def _required_signers(self, place: Path) -> Keyring | None:
        try:
            return None if self._signers is None else self._signers()
        except InputError as error:
            message = f"bundle {place} cannot be trusted: {error}"
            raise BundleError(message, hint=error.hint) from None

    def mount_or_reject(self, path: Path) -> None:
        """Mount a bundle that the settings name. One that cannot be used is an event.

        It is an error of the first lookup in a sealed process: see `require_all`.
        """
        try:
            self.mount(path)
        except BundleError as error:
            self._events.emit("refused", path=str(path), reason=str(error))
            self.rejected[split_pin(path)[0]] = error

    def require_all(self, mode: SealMode) -> None:
        """Raise `BundleError` in a sealed process if a bundle of the settings could not be mounted.

        Callers look at `rejected` first, because nearly every lookup has nothing to raise.
        """
        if self.rejected and mode is SealMode.ERROR:
            raise with_others([*map(_sealed_error, self.rejected.values())])

    def fault_of(self, digest: str) -> str | None:
        """Return why the entry of a bundle under `digest` cannot be used, or None if there is none."""
        for bundle in tuple(self.mounted.values()):
            try:
                bundle.get(digest)
            except OSError as fault:
                return _fault_reason(bundle, fault)
            except codec.DamagedEntryError:
                return _damage_reason(bundle)
        return None

    def blobs(self, digest: str) -> Iterator[bytes]:
        """Yield the verified bytes of each bundle that has an entry under `digest`."""
        for bundle in tuple(self.mounted.values()):
            try:
                blob = bundle.get(digest)
            except OSError as fault:
                self._events.fault("bundle", "read", fault)
            except codec.DamagedEntryError as bad:
                self._events.emit("damaged", tier="bundle", key=digest, reason=str(bad))
            else:
                if blob is not None:
                    yield blob

    def entries(self, key: str, in_use: InUse) -> Iterator[BundleEntry | str]:
        """Yield the entry of each bundle that has the request `key`, or why it cannot be read."""
        for bundle in tuple(self.mounted.values()):
            known = self._decoded.get((bundle, key))
            artifact = None if known is None else in_use.get(known[0])
            if known is not None and artifact is not None:
                yield BundleEntry(key, artifact, **known[1])
                continue
            try:
                entry = read(bundle, key, in_use)
            except OSError as fault:
                self._events.fault("bundle", "read", fault)
                yield _fault_reason(bundle, fault)
            except codec.DamagedEntryError as bad:
                self._events.emit("damaged", tier="bundle", key=key, reason=str(bad))
                yield _damage_reason(bundle)
            else:
                if entry is not None:
                    names = ("state", "entries", "untracked_reason", "include", "toolkit")
                    rest = {name: getattr(entry, name) for name in names}
                    self._decoded[bundle, key] = entry.artifact.digest, rest
                    yield entry


def _sealed_error(error: BundleError) -> BundleError:
    """Return the error of a sealed process for a bundle that could not be mounted."""
    hint = _COPY_AGAIN if isinstance(error.__cause__, OSError) else error.hint
    return BundleError(
        f"{error} (this process is sealed, and its settings name this bundle)", hint=hint
    )


def _fault_reason(bundle: Bundle, fault: OSError) -> str:
    return f"unreadable: {bundle.path} cannot be read: {fault}"


def _damage_reason(bundle: Bundle) -> str:
    return f"{DAMAGED_ENTRY} {bundle.path} failed its check"


def baked_archs(bundle: Bundle) -> tuple[Arch, ...]:
    """Return the architectures of a bundle. Raises `BundleError` when the list is invalid."""
    try:
        return tuple(map(Arch.parse, bundle.meta.get("archs", ())))
    except (TypeError, InputError):
        raise BundleError(f"bundle {bundle.path} lists architectures that cannot be read") from None


def runs(device: Arch, archs: Iterable[Arch]) -> bool:
    """Return True if a device runs the code of one of `archs`."""
    return not {*runnable_archs(device)}.isdisjoint(archs)


def named(archs: Iterable[Arch]) -> str:
    """Return architectures for a message: `sm_80, sm_90 and sm_100`."""
    *first, last = map(str, sorted(set(archs)))
    return f"{', '.join(first)} and {last}" if first else last


def require_code(bundle: Bundle, archs: Iterable[Arch], device: Arch) -> None:
    """Raise `BundleError` unless a device runs code of a bundle whose programs have these `archs`."""
    if not runs(device, archs):
        raise BundleError(
            f"{shown_path(str(bundle.path))} has code for {named(archs)}, and none for {device}",
            hint=f"bake for {device} as well: {bake_command(bundle, device)}",
        )


def bake_command(bundle: Bundle, wanted: Arch | None) -> str:
    """Return the command that bakes a bundle again, for `wanted` and the architectures that it has."""
    manifest = bundle.path.with_suffix(".toml")
    archs = set() if wanted is None else {wanted}
    with suppress(BundleError):
        archs.update(baked_archs(bundle))
    words = ["preheat", "bake"]
    words.append(shown_path(str(manifest)) if manifest.is_file() else "MANIFEST")
    words += (word for arch in sorted(archs) for word in ("--arch", str(arch)))
    if not manifest.is_file():
        words += "-o", shown_path(str(bundle.path))
    return shlex.join(words)
