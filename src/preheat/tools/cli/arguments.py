"""Arguments of commands that name files: bundles with or without a pin, and manifests to write."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from preheat.errors import BundleError, InputError
from preheat.model.config import shown_url
from preheat.model.setting_values import split_pin
from preheat.store.publish import unwritable_reason

__all__ = ["BUNDLE", "LocalFile", "require_file", "require_writable"]


class LocalFile(click.Path):
    """A path. The error for a URL does not repeat the URL, which may contain a password."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        self.refuse_url(os.fspath(value), param, ctx)
        return super().convert(value, param, ctx)

    def refuse_url(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> None:
        """Fail if the value is a URL."""
        if "://" in text:
            self.fail(f"{shown_url(text)} is a URL, where a file is expected", param, ctx)


class _BundleFile(LocalFile):
    """`FILE` or `FILE@sha256:…`, of a file that exists. The value is the path with its pin."""

    name = "file[@sha256:hex]"

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        self.refuse_url(os.fspath(value), param, ctx)
        try:
            path, _ = split_pin(value)
        except BundleError as error:
            self.fail(str(error), param, ctx)
        super().convert(path, param, ctx)
        return Path(value)


BUNDLE = _BundleFile(exists=True, dir_okay=False)


_HINT = "name another file for the manifest with -o"


def require_file(named: Path) -> None:
    """Raise for `-`, which stands for standard output."""
    if str(named) == "-":
        message = (
            "a manifest cannot be written to standard output, because it has source files beside it"
        )
        raise InputError(message, hint=_HINT)


def require_writable(target: Path) -> None:
    """Raise unless a manifest can be created or replaced at `target`."""
    if why := unwritable_reason(target):
        make = f"create it: mkdir -p {shlex.quote(str(target.parent))}"
        raise InputError(
            f"cannot write {target}: {why}", hint=_HINT if target.parent.exists() else make
        )
