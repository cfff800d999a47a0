"""The reference: every public name is on a page, and what the pages say exists."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import preheat
from preheat.model.events import EVENTS, OBJECT_EVENTS
from tests.public_names import MODULES, public_names
from tests.shown_output import compare
from tests.stories import blocks

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
ERRORS = ROOT / "docs" / "reference" / "errors.md"
EVENTS_PAGE = ROOT / "docs" / "reference" / "events.md"


def targets() -> list[str]:
    """Return the objects that the pages show by their docstrings."""
    return [
        name for page in PAGES for name in re.findall(r"^::: (preheat\S*)$", page.read_text(), re.M)
    ]


def errors() -> list[str]:
    """Return the names of all errors and warnings of preheat."""
    kinds = [getattr(preheat, name) for name in preheat.__all__ if name != "__version__"]
    return [
        kind.__name__
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, preheat.PreheatError | Warning)
    ]


def test_every_target_of_a_reference_page_exists() -> None:
    for name in targets():
        if name not in MODULES:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
    assert len(targets()) == len(set(targets()))


def test_every_public_name_is_on_a_reference_page() -> None:
    shown = {*targets(), *(f"preheat.{name}" for name in sections())}
    for module, library in MODULES.items():
        if library is None and module not in shown:
            for name in public_names(module):
                owner = name.name.rpartition(".")[0]
                assert {name.name, owner} & shown, name.name


# Errors


def sections() -> dict[str, str]:
    """Return the text about each error."""
    parts = re.split(r"^### (\w+)$", ERRORS.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_on_errors_has_every_error_with_its_cure_and_a_message() -> None:
    assert sorted(sections()) == sorted({*errors()} - {"PreheatError"})
    for name, text in sections().items():
        assert "**What to do:** " in text, name
        assert "```text\n" in text, name


def test_the_tree_on_the_page_is_that_of_the_code() -> None:
    module = preheat.errors.__doc__ or ""
    (tree,) = (block.text for block in blocks(ERRORS) if block.text.startswith("PreheatError\n"))
    assert [line.strip() for line in tree.splitlines()] == [
        line.strip() for line in module.splitlines() if re.match(r" {4,}\w+(Error|Fault)\b", line)
    ]
    assert {"LinkError", "LinkedSymbol"} <= set(preheat.__all__)


def test_the_errors_of_the_page_are_raised_as_it_shows(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in [*sys.path, str(ROOT)] if path),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
    }
    command = [sys.executable, "-m", "tests.error_examples", str(ERRORS)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = [block.output or "" for block in blocks(ERRORS) if block.kind == "python"][1:]
    raised = json.loads(done.stdout)
    assert len(raised) > 20
    for (heading, name, text), output in zip(raised, shown, strict=True):
        assert name == heading, text
        compare(output, text)


# Events


def test_the_page_on_events_lists_every_event_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (`.*?`) \|", EVENTS_PAGE.read_text(), re.M)
    listed = {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}
    known = {**EVENTS, **OBJECT_EVENTS}
    assert list(listed) == list(known)
    for name, text in known.items():
        fields = re.search(r"\[(.*)\]$", text)
        assert fields is not None
        assert listed[name] == fields[1].split(", "), name


# Commands


def test_the_page_on_commands_has_the_help_of_every_command() -> None:
    """`make pictures` writes the page. click keeps options of commands, so the process is a new one."""
    code = "import sys, cli_reference; sys.stdout.write(cli_reference.reference())"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == ran.stdout
