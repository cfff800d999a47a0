"""Parsers of the values of settings: most take the name of a variable and its text.

A bundle can be named with the SHA-256 of its file: `kernels.heat@sha256:<64 hexadecimal digits>`. This
pin is part of the name of the bundle everywhere. Code that does not handle pins does not find a file of
that name, so it cannot use a file that was not compared with its pin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from preheat.errors import BundleError, ConfigError

__all__ = [
    "Address",
    "address",
    "boolean",
    "bundles",
    "choice",
    "count",
    "directories",
    "directory",
    "positive_seconds",
    "seconds",
    "shown_url",
    "size",
    "split_pin",
    "split_places",
    "urls",
    "word",
]

_MAX_SECONDS = 1_000_000_000  # Thirty years: more is a typing error.
_MARK = "@sha256"
_PINNED = re.compile(rf"(.+){_MARK}:([0-9a-fA-F]{{64}})", re.DOTALL)
# The colon of a pin is the separator of PATH as well.
_SEPARATOR = re.compile(rf"(?<!{_MARK}){re.escape(os.pathsep)}")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def boolean(name: str, text: str) -> bool:
    """Parse 1/true/yes/on or 0/false/no/off in any case."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(name, text, "a switch: use 1/true/yes/on or 0/false/no/off")
    return word in _TRUE


def size(name: str, text: str) -> int:
    """Parse a number of bytes, plain or with a unit: 500000, 512MiB, 2G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(name, text, "a size: use bytes or a unit, such as 512MiB or 2G")
    value = float(match[1]) * _UNITS[match[2]]
    if value >= 1 << 63:
        raise ConfigError(name, _start(text), "a size below 8 EiB")
    return int(value)


def _start(text: str) -> str:
    """Return the start of a value, enough to recognise it."""
    return text if len(text) <= 40 else f"{text[:40]}…"


def count(name: str, text: str) -> int:
    """Parse a whole number, zero or more."""
    if not text.strip().isdecimal():
        raise ConfigError(name, _start(text), "a whole number")
    if len(text.strip()) > 18:
        raise ConfigError(name, _start(text), "a whole number of at most 18 digits")
    return int(text)


def seconds(name: str, text: str) -> float:
    """Parse a number of seconds, zero or more."""
    if not re.fullmatch(r"\d+(?:\.\d+)?", text.strip()):
        raise ConfigError(name, _start(text), "a number of seconds")
    value = float(text)
    if value > _MAX_SECONDS:
        raise ConfigError(name, _start(text), f"a number of seconds, at most {_MAX_SECONDS:,}")
    return value


def choice(*words: str) -> Callable[[str, str], str]:
    """Return a parser of one of these words."""

    def parse(name: str, text: str) -> str:
        if (chosen := text.strip().lower()) not in words:
            raise ConfigError(name, _start(text), f"one of its values: use {' or '.join(words)}")
        return chosen

    return parse


def word(name: str, text: str) -> str:
    """Return a word without white space around it."""
    del name
    return text.strip()


def directory(name: str, text: str) -> Path:
    """Parse a path, which may start with `~`. It is made absolute, so a later chdir has no effect."""
    if "\0" in text:
        raise ConfigError(name, text, "a path: it has a NUL character in it")
    return Path(os.path.abspath(os.path.expanduser(text)))


def urls(name: str, text: str) -> tuple[str, ...]:
    """Parse URLs with white space between them. What they mean is checked when they are used."""
    addresses = tuple(text.split())
    if not all(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url) for url in addresses):
        raise ConfigError(name, shown_url(text), "a URL, such as s3://bucket/kernels")
    return addresses


def shown_url(text: str) -> str:
    """Return the part of an invalid URL that cannot have a password in it: its scheme."""
    return f"{match[0]}…" if (match := re.match(r"[a-z][a-z0-9+]{0,11}://", text.strip())) else "…"


def positive_seconds(name: str, text: str) -> float:
    """Parse a number of seconds, more than zero."""
    value = seconds(name, text)
    if value <= 0:
        raise ConfigError(name, _start(text), "a number of seconds above zero")
    return value


def directories(name: str, text: str) -> tuple[Path, ...]:
    """Parse paths that are separated by the path separator of the platform."""
    return tuple(directory(name, part) for part in text.split(os.pathsep) if part.strip())


class Address(NamedTuple):
    """A network address to listen on. An empty host means every address of this machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+(?:%\w+)?)\]|([\w.-]*)):(\d{1,5})", re.IGNORECASE | re.ASCII)


def address(name: str, text: str) -> Address:
    """Parse an address: `host:port`, `:port` for every address of this machine, or `[::1]:port`."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 0 < int(match[3]) < 1 << 16:
        meant = "an address: use host:port, :port or [::1]:port, with a port from 1 to 65535"
        raise ConfigError(name, _start(text), meant)
    return Address(match[1] or match[2] or "", int(match[3]))


def bundles(name: str, text: str) -> tuple[Path, ...]:
    """Parse bundles that are separated like PATH. The pin of a bundle is the end of its name."""
    places = split_places(text)
    for place in places:
        try:
            split_pin(place)
        except BundleError:
            raise ConfigError(
                name, text, "a list of bundles: a pin is @sha256: and 64 hexadecimal digits"
            ) from None
    return tuple(directory(name, place) for place in places)


def split_pin(place: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return the path of a bundle and its pin or None; `BundleError` for an invalid pin."""
    text = os.fspath(place)
    if f"{_MARK}:" not in text:
        return Path(text), None
    pinned = _PINNED.fullmatch(text)
    if pinned is None:
        raise BundleError(
            f"{text}: a pin is {_MARK}: and 64 hexadecimal digits at the end",
            hint="'preheat bundle ls FILE' prints the name to use",
        )
    return Path(pinned[1]), pinned[2].lower()


def split_places(text: str) -> list[str]:
    """Split a list of bundles that are separated like PATH, each with or without a pin."""
    return [place for place in _SEPARATOR.split(text) if place.strip()]
