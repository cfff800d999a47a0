"""The stores that the command line names: a directory, a bundle, or the URL of a server."""

from __future__ import annotations

import os
from pathlib import Path

from preheat.build.signers import required_signers
from preheat.config import Config
from preheat.errors import InputError
from preheat.pins import split_pin
from preheat.store.bundle import Bundle
from preheat.store.remote.url import parse_remote
from preheat.sync.bundle_file import BundleSource, BundleTarget
from preheat.sync.directory import open_directory
from preheat.sync.remote_store import open_remote
from preheat.sync.store import Source, Target

__all__ = [
    "bundle_output",
    "is_bundle",
    "is_url",
    "open_bundle",
    "open_source",
    "open_target",
    "require_different",
    "shown",
]


def is_url(text: str) -> bool:
    """Return whether a store is named by a URL."""
    return "://" in text


def is_bundle(text: str) -> bool:
    """Return whether a store is a bundle, with or without a pin: a file, or a name in `.heat`."""
    if is_url(text):
        return False
    path, pin = split_pin(text)
    return pin is not None or path.is_file() or (path.suffix == ".heat" and not path.is_dir())


def open_bundle(text: str, config: Config) -> Bundle:
    """Open a bundle to read, as a process with these settings would mount it."""
    signers = required_signers(config)
    return Bundle.open(
        text, trust=config.trust_cache_dir, signers=None if signers is None else signers()
    )


def open_source(text: str, config: Config) -> Source:
    """Open the store to copy from; `InputError` or `BundleError` when it cannot be used."""
    if is_url(text):
        return open_remote(text, config, write=False)
    if is_bundle(text):
        return BundleSource(open_bundle(text, config))
    return open_directory(_absolute(text), config, write=False)


def open_target(text: str, config: Config) -> Target:
    """Open the store to copy to; a directory is made where there is none."""
    if is_url(text):
        return open_remote(text, config, write=True)
    if is_bundle(text):
        return BundleTarget(bundle_output(text))
    return open_directory(_absolute(text), config, write=True)


def bundle_output(text: str) -> Path:
    """Return the path of a bundle to write; `InputError` for one with a pin, which never changes."""
    path, pin = split_pin(text)
    if pin is not None:
        raise InputError(f"{text} has a pin, and cannot be written")
    return path


def shown(text: str) -> str:
    """Return the name of a store for messages: a URL without its credentials."""
    return parse_remote(text).name if is_url(text) else text


def require_different(one: str, other: str) -> None:
    """Raise `InputError` when both names lead to one store."""
    same = one == other if is_url(one) or is_url(other) else _absolute(one) == _absolute(other)
    if same:
        raise InputError(f"{shown(one)} and {shown(other)} are the same store")


def _absolute(text: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(text)))
