"""Settings: one grammar for each kind of value, and errors that name the variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preheat.errors import ConfigError
from preheat.model.config import VARIABLES, Config

SOURCE = Path(__file__).parents[2] / "src" / "preheat"


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " on "])
def test_switches_that_are_on(text: str) -> None:
    assert Config.from_env({"PREHEAT_TRUST_CACHE_DIR": text}).trust_cache_dir is True


@pytest.mark.parametrize("text", ["0", "false", "NO", "Off"])
def test_switches_that_are_off(text: str) -> None:
    assert Config.from_env({"PREHEAT_CACHE": text}).cache is False


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0),
        ("1000", 1000),
        ("2k", 2048),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("1GB", 10**9),
    ],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert Config.from_env({"PREHEAT_CACHE_LIMIT": text}).cache_limit == bytes_


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PREHEAT_CACHE", "maybe"),
        ("PREHEAT_TRUST_CACHE_DIR", "2"),
        ("PREHEAT_CACHE_LIMIT", "lots"),
        ("PREHEAT_CACHE_LIMIT", "-1"),
        ("PREHEAT_CACHE_FILES", "1.5"),
        ("PREHEAT_LOCK_WAIT", "soon"),
        ("PREHEAT_COMPILE_TIMEOUT", "-3"),
    ],
)
def test_a_value_that_makes_no_sense_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}='{re.escape(value)}' is not"):
        Config.from_env({variable: value})


def test_an_empty_value_counts_as_unset() -> None:
    assert Config.from_env(dict.fromkeys((v.name for v in VARIABLES), "")) == Config.from_env({})


def test_layers_are_separated_like_path() -> None:
    assert Config.from_env({"PREHEAT_LAYERS": "/a:/b:"}).layers == (Path("/a"), Path("/b"))


def test_paths_are_made_absolute_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.from_env({"PREHEAT_CACHE_DIR": "here"}).cache_dirs[0] == tmp_path / "here"


def test_only_config_reads_the_environment() -> None:
    """`preheat` itself and the plugin of pytest import next to nothing, not even `model.config`.

    Adapters set the variables of their libraries, and runs of tests on the CPU driver set its seed.
    """
    readers = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if re.search(r"os\.environ|os\.getenv|getenv\(", file.read_text())
    }
    others = {file for file in readers if not file.startswith("adapters/")}
    assert others == {"model/config.py", "__init__.py", "pytest_plugin.py", "tools/testing/driver.py"}


def test_every_variable_read_by_config_is_listed() -> None:
    named = set(re.findall(r'"(PREHEAT_\w+)"', (SOURCE / "model" / "config.py").read_text()))
    assert named == {variable.name for variable in VARIABLES}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PREHEAT_CACHE_LIMIT", "9" * 400, "a size below 8 EiB"),
        ("PREHEAT_CACHE_LIMIT", "99999999999999TiB", "a size below 8 EiB"),
        ("PREHEAT_MEMORY_LIMIT", f"{2**63}", "a size below 8 EiB"),
        ("PREHEAT_CACHE_FILES", "9" * 5000, "at most 18 digits"),
        ("PREHEAT_LOCK_WAIT", "9" * 400, "at most 1,000,000,000"),
        ("PREHEAT_COMPILE_TIMEOUT", "1000000001", "at most 1,000,000,000"),
        ("PREHEAT_COMPILE_TIMEOUT", "inf", "a number of seconds"),
        ("PREHEAT_COMPILE_TIMEOUT", "nan", "a number of seconds"),
        ("PREHEAT_CACHE_DIR", "a\0b", "a path"),
        ("PREHEAT_LAYERS", "/a:/b\0c", "a path"),
    ],
)
def test_values_that_are_far_too_large_are_refused_in_few_words(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        Config.from_env({name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("PREHEAT_CACHE_LIMIT", f"{2**62}"), ("PREHEAT_CACHE_FILES", "9" * 18)],
)
def test_large_values_are_taken(name: str, value: str) -> None:
    assert int(value) in vars(Config.from_env({name: value})).values()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://:top secret@127.0.0.1:6379/0", "redis://…"),
        ("default:secret@127.0.0.1:6379", "…"),
        ("s3://bucket secret", "s3://…"),
    ],
)
def test_a_value_that_is_no_url_is_shown_by_its_scheme_alone(value: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"PREHEAT_REMOTE": value})
    assert f"PREHEAT_REMOTE={shown!r}" in str(caught.value)
    assert "secret" not in f"{caught.value!r} {caught.value.__dict__}"
