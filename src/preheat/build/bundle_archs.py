"""The architectures that bundles have code for, and the command that bakes one for more of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from preheat.errors import BundleError, InputError
from preheat.model.arch import Arch, runnable_archs
from preheat.process.callsite import shown_path
from preheat.process.locks import no_fork

if TYPE_CHECKING:
    from preheat.store.bundle import Bundle

__all__ = ["bake_command", "baked_archs", "named", "require_code", "runs"]


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
    with no_fork:
        import shlex  # needed only for a message

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
