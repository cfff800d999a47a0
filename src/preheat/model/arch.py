"""GPU architectures: `sm_90`, `sm_90a`, `sm_100f`, and which of them run code for another."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from preheat.errors import InputError

__all__ = ["LISTED_ARCHS", "Arch", "mismatch", "runnable_archs"]

_NAME = re.compile(r"(?:sm_|compute_)?(\d{2,3})([af]?)")


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """A target of a compile: a compute capability and a suffix. `sm_90a` is not `sm_90`.

    Attributes:
        major: The major version of the compute capability.
        minor: The minor version.
        suffix: `"a"` for code that runs on exactly one compute capability, `"f"` for code that runs on
            a family (one major version, and its own minor version or a higher one), or an empty string.
        name: The whole name, such as `"sm_90a"`.

    Examples:
        >>> preheat.Arch(9, 0, "a").name
        'sm_90a'
        >>> preheat.Arch.parse("sm_90") < preheat.Arch.parse("sm_100")
        True
    """

    major: int
    minor: int
    suffix: str = ""
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"sm_{self.major}{self.minor}{self.suffix}")

    @classmethod
    def parse(cls, text: str | Arch) -> Arch:
        """Read an architecture from a text such as `sm_90a`, `90a` or `9.0`.

        Raises:
            InputError: The text is not an architecture.

        Examples:
            >>> str(preheat.Arch.parse("9.0"))
            'sm_90'
        """
        return text if isinstance(text, Arch) else _parse(str(text))

    def __str__(self) -> str:
        return self.name

    @property
    def plain(self) -> Arch:
        """The same compute capability without a suffix."""
        return Arch(self.major, self.minor)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Arch:
    match = _NAME.fullmatch(text.strip().replace(".", ""))
    if match is None or int(match[1]) < 50:
        raise InputError(
            f"{text!r} is not a GPU architecture", hint="use a name such as sm_90, sm_90a or sm_100f"
        )
    number = int(match[1])
    return Arch(number // 10, number % 10, match[2])


#: The architectures that the compilers of CUDA 12 and 13 support, without suffixes. sm_101 is the name
#: of sm_110 in CUDA 12. A compiler that is newer than preheat may support more.
LISTED_ARCHS = frozenset(
    Arch(number // 10, number % 10)
    for number in (
        *(50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90),
        *(100, 101, 103, 107, 110, 120, 121),
    )
)


def mismatch(target: Arch, device: Arch, *, strict: bool = False) -> str | None:
    """Return why code for `target` cannot run on `device`, or None if it can.

    `device` is what a GPU reports, and its suffix is ignored: an H200 reports sm_90 and runs sm_90a
    code.
    """
    needed = (target.major, target.minor)
    available = (device.major, device.minor)
    if strict and target != device:
        return "strict matching requires the same architecture"
    if target.suffix == "a" and needed != available:
        return f"an 'a' target runs only on compute capability {target.major}.{target.minor}"
    if target.suffix == "f" and (target.major != device.major or needed > available):
        return f"an 'f' target runs only on its own family, from {target.major}.{target.minor} on"
    if needed > available:
        return "the target is newer than the device"
    return None


def runnable_archs(device: Arch) -> Iterator[Arch]:
    """Yield the architectures whose code a device runs: its own, `a`, family, lower minors."""
    major, minor = device.major, device.minor
    yield device if not device.suffix else device.plain
    yield Arch(major, minor, "a")
    if major >= 10:
        for m in range(minor, -1, -1):
            yield Arch(major, m, "f")
    for m in range(minor - 1, -1, -1):
        yield Arch(major, m)
