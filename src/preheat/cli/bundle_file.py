"""Bundles as arguments of commands: a file, with or without a pin."""

from __future__ import annotations

import os
from pathlib import Path

import click

from preheat.errors import BundleError
from preheat.pins import split_pin

__all__ = ["BUNDLE"]


class _BundleFile(click.Path):
    """`FILE` or `FILE@sha256:…`, of a file that exists. The value is the path with its pin."""

    name = "file[@sha256:hex]"

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        try:
            path, _ = split_pin(value)
        except BundleError as error:
            self.fail(str(error), param, ctx)
        super().convert(path, param, ctx)
        return Path(value)


BUNDLE = _BundleFile(exists=True, dir_okay=False)
