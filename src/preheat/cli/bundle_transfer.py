"""`preheat bundle push` and `pull`: bundles on a server, named by their content."""

from __future__ import annotations

from pathlib import Path

import click

from preheat.cli.bundle_file import LocalFile
from preheat.cli.output import print_json, print_line, print_message, size
from preheat.sync.bundle_objects import pull, push

__all__ = ["pull_command", "push_command"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("push")
@click.argument("file", type=LocalFile(exists=True, dir_okay=False, path_type=Path))
@click.argument("url")
@_JSON
def push_command(file: Path, url: str, as_json: bool) -> None:
    """Write FILE to the server at URL, and print its pin.

    The bundle is stored under its SHA-256, beside the entries of PREHEAT_REMOTE. The pin always names
    the same bytes. The command first checks that the store can be written to.

    \b
    Example:
      preheat bundle push kernels.heat s3://team/kernels
    """
    digest, written = push(file, url)
    if as_json:
        print_json({"bundle": file, "pin": f"sha256:{digest}", "written": written})
    else:
        print_line(f"sha256:{digest}")
        print_message(f"{file} {'written' if written else 'was there already'}")


@click.command("pull")
@click.argument("url")
@click.argument("pin")
@click.option("-o", "--output", required=True, type=LocalFile(path_type=Path), help="File to write.")
@_JSON
def pull_command(url: str, pin: str, output: Path, as_json: bool) -> None:
    """Read the bundle PIN from the server at URL, and verify it.

    PIN is the pin that `preheat bundle push` printed. A bundle with other bytes is refused, so no key
    is needed.

    \b
    Example:
      preheat bundle pull s3://team/kernels sha256:9f86d081… -o kernels.heat
    """
    nbytes = pull(url, pin, output)
    if as_json:
        print_json({"bundle": output, "pin": pin, "bytes": nbytes})
    else:
        print_message(f"{output}: {size(nbytes)}")
