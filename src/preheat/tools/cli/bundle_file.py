"""Arguments of commands that name files, or bundles with or without a pin."""

from __future__ import annotations

import os
from pathlib import Path

import click

from preheat.errors import BundleError
from preheat.model.config import shown_url
from preheat.model.setting_values import split_pin

__all__ = ["BUNDLE", "LocalFile"]


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
