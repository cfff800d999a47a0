"""Manifests that are rejected, with the line and the reason, and the literals of graph keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead.manifest import GraphKeys, Manifest, key_literal
from preheat.errors import InputError
from tests.ahead.manifest.support import written

# Rejects

K = '[[program]]\nfile = "k.cu"\n'


REJECTS: dict[str, tuple[str, str, str | None]] = {
    "not TOML": ("version = 2\n[[program]\n", ":2: not TOML: ", None),
    "an open text": ('version = 2\n[[program]]\nlabel = "a', ":3: not TOML: Unterminated", None),
    "a key twice": ("version = 2\n\nversion = 2\n", ":3: not TOML: Cannot overwrite a value", None),
    "a long number": (f"version = {'1' * 5000}\n", ": not TOML: ", None),
    "deep": (f"version = {'[' * 5000}\n", ": not TOML: ", None),
    "no version": (K, ": it has no version", "begin the file with: version = 2"),
    "empty": ("", ": it has no version", "begin the file with: version = 2"),
    "newer": ("# x\nversion = 3\nnew = 1\n", ":2: version 3 is not known", "update it"),
    "other version": ("version = 0\n", ":1: version 0 is not known", "this preheat reads version 2"),
    "version of text": ('version = "1"\n', ":1: version must be a whole number, not '1'", None),
    "version true": ("version = true\n", ":1: version must be a whole number, not True", None),
    "unknown table": (
        f"version = 2\n{K}[[programs]]\n",
        ":4: unknown key 'programs'",
        "did you mean 'prog",
    ),
    "one table": (
        'version = 2\n[program]\nfile = "k"\n',
        ":2: program must be written as [[program]]",
        None,
    ),
    "a list": ("version = 2\ngraph = [1]\n", ":2: graph must be written as [[graph]], not [1]", None),
    "unknown key": (
        f'version = 2\n{K}[[program]]\nlabel = "a.cu"\nsource = "x"\noption = ["-a"]\n',
        ":7: a.cu: unknown key 'option'",
        "did you mean 'options'?",
    ),
    "nothing like it": (
        f"version = 2\n{K}zzz = 1\n",
        ":4: k.cu: unknown key 'zzz'",
        "the keys are label, file",
    ),
    "quoted key": (f'version = 2\n{K}"a b" = 1\n', ":4: k.cu: unknown key 'a b'", None),
    "graph key": (
        'version = 2\n[[graph]]\nname = "g"\nkey = "1"\n',
        ":4: g: unknown key 'key'",
        "'keys'",
    ),
    "a text for a list": (
        f'version = 2\n{K}options = "-a"\n',
        ":4: k.cu: options must be a list of texts, not '-a'",
        None,
    ),
    "a number in a list": (
        f"version = 2\n{K}names = [1]\n",
        ":4: k.cu: names must be a list of texts",
        None,
    ),
    "a number for a text": (
        "version = 2\n[[program]]\nfile = 1\n",
        ":3: program 1: file must be text, n",
        None,
    ),
    "headers": (
        f"version = 2\n{K}headers = {{ a = 1 }}\n",
        ":4: k.cu: headers must be a table from",
        None,
    ),
    "headers table": (
        f"version = 2\n{K}[program.headers]\na = 1\n",
        ": k.cu: headers must be a table",
        None,
    ),
    "seconds": (
        f"version = 2\n{K}seconds = nan\n",
        ":4: k.cu: seconds must be a number of seconds",
        None,
    ),
    "endless": (
        f"version = 2\n{K}seconds = inf\n",
        ":4: k.cu: seconds must be a number of seconds",
        None,
    ),
    "requests": (
        f"version = 2\n{K}requests = -1\n",
        ":4: k.cu: requests must be a whole number, not -1",
        None,
    ),
    "asked true": (
        f"version = 2\n{K}requests = true\n",
        ":4: k.cu: requests must be a whole number",
        None,
    ),
    "arch": (
        f'version = 2\n{K}arch = ["sm_90", "h100"]\n',
        ":4: k.cu: 'h100' is not a GPU architecture",
        "use a name such as sm_90",
    ),
    "neither": (
        'version = 2\n[[program]]\nlabel = "x"\n[[program]]\nsource = "y"\n',
        ":2: x: it has neither `file` nor `source`",
        "name one",
    ),
    "both": (
        f'version = 2\n{K}source = "x"\n',
        ":4: k.cu: it has both `file` and `source`",
        "name one",
    ),
    "inline": (
        'version = 2\nprogram = [{ file = "k.cu", a = 1 }]\n',
        ".toml: k.cu: unknown key 'a'",
        None,
    ),
    "no graph name": (
        'version = 2\n[[graph]]\nkeys = ["1"]\n',
        ":2: graph 1: a [[graph]] needs a n",
        None,
    ),
    "key": (
        'version = 2\n[[graph]]\nname = "g"\nkeys = ["1", "f(x)"]\n',
        ":4: g: key 'f(x)' is not a Python literal",
        "such as",
    ),
    "a key of many parts": (
        f"version = 2\n{K}" + ".".join(["a", '"b"', "'c'", "d "] * 5000) + " = 1\n",
        ":4: a key has more than 100 parts",
        None,
    ),
    "a table of many parts": (
        f"version = 2\n[{' . '.join(['a'] * 20_000)}]\n",
        ":2: a key has more than 100 parts",
        None,
    ),
    "unhashable key": (
        'version = 2\n[[graph]]\nname = "g"\nkeys = ["[1]"]\n',
        ":4: g: key '[1]' is not",
        None,
    ),
    "hostile title": (
        'version = 2\n[[program]]\nlabel = "a\\nb\\u001b[31m"\nx = 1\n',
        r":4: a\nb\x1b[31m: unknown key 'x'",
        None,
    ),
}


@pytest.mark.parametrize("what", REJECTS)
def test_rejects(what: str, manifest_file: Path) -> None:
    text, message, hint = REJECTS[what]
    manifest_file.write_text(text)
    with pytest.raises(InputError) as caught:
        Manifest.read(manifest_file)
    assert str(caught.value).startswith(str(manifest_file))
    assert message in str(caught.value)
    assert hint is None or hint in str(caught.value.hint)


def test_a_text_with_many_dots_is_no_key(read: Callable[[str], Manifest], kernel: Path) -> None:
    option = "-DLIST=" + ".,".join(map(str, range(1000))) + "." * 1000 + "x" * 100_000
    manifest = read(f'[[program]]\nfile = "kernels/k.cu"\noptions = ["{option}"]\n')
    assert manifest.programs[0].program.options == (option,)
    assert kernel.exists()


def test_a_source_that_is_too_large_is_not_read(
    read: Callable[[str], Manifest], kernel: Path, tmp_path: Path
) -> None:
    """A file with a hole takes no space on the disk."""
    os.truncate(kernel, 20 << 30)
    ((_, error),) = read('[[program]]\nfile = "kernels/k.cu"\n').unreadable
    assert "21,474,836,480 bytes are too many" in str(error)
    manifest = tmp_path / "large.toml"
    manifest.touch()
    os.truncate(manifest, 20 << 30)
    with pytest.raises(InputError, match="21,474,836,480 bytes are too many"):
        Manifest.read(manifest)


def test_rejects_a_manifest_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        Manifest.read(tmp_path / "none.toml")
    (tmp_path / "k.toml").write_bytes(b"version = 2\n\xff")
    with pytest.raises(InputError, match=r"k\.toml:2: byte 0xff is not UTF-8 text"):
        Manifest.read(tmp_path / "k.toml")


@pytest.mark.parametrize(
    "text", ["f(x)", "[1]", "{}", "({1},)", "", "1 +", "1e999", "\0", "(" * 500, "x"]
)
def test_a_value_that_cannot_be_a_graph_key_is_no_literal(text: str) -> None:
    assert key_literal(text) is None


@pytest.mark.parametrize("key", [1, True, None, "ä\n", (), (1,), ((1, 2.5), "a"), b"\xff", -3, 1 + 2j])
def test_a_graph_key_comes_back_exactly(key: Any, manifest_file: Path) -> None:
    (graph,) = written(Manifest(graphs=(GraphKeys("g", (repr(key),)),)), manifest_file).graphs
    assert graph.values == (key,)
    assert type(graph.values[0]) is type(key)


def test_a_key_has_one_spelling(read: Callable[[str], Manifest]) -> None:
    (graph,) = read('[[graph]]\nname = "g"\nkeys = ["(1,128)", " (1, 128)", "0x10"]\n').graphs
    assert graph.keys == ("(1, 128)", "16")
