"""The call site: the first line outside preheat and Python's standard library."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from preheat.process import callsite
from preheat.process.callsite import call_site, caller, file_and_line, format_site, shown_path


def test_it_is_the_line_that_called() -> None:
    line = sys._getframe().f_lineno + 1
    assert file_and_line(call_site()) == (__file__, line)
    assert caller() == f"tests/process/test_callsite.py:{line + 1}"


def test_frames_of_the_standard_library_are_passed_over() -> None:
    @contextlib.contextmanager
    def block() -> Iterator[str]:
        yield next(reported)

    reported = (caller() for _ in [0])
    with block() as inside:
        assert inside.startswith("tests/process/test_callsite.py:")


def test_an_installed_package_counts_as_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib" / "python3"
    package = library / "site-packages" / "theirs"
    package.mkdir(parents=True)
    (package / "ask.py").write_text("def ask(whom):\n    return whom()\n")
    monkeypatch.setattr(callsite, "_PYTHON", f"{library}/")
    monkeypatch.setattr(callsite, "_INSIDE", (callsite._HERE, f"{library}/"))
    monkeypatch.syspath_prepend(package)
    from ask import ask  # type: ignore[import-not-found]

    assert ask(caller) == "theirs/ask.py:2"


def test_an_excluded_library_does_not_count_as_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "theirs"
    library.mkdir()
    (library / "ask_for.py").write_text("def ask_for(whom):\n    return whom()\n")
    monkeypatch.syspath_prepend(library)
    from ask_for import ask_for  # type: ignore[import-not-found]

    monkeypatch.setattr(callsite, "_libraries", [])
    assert ask_for(caller).endswith("theirs/ask_for.py:2")
    callsite.exclude_library(f"{library}/")
    callsite.exclude_library(f"{library}/")
    line = sys._getframe().f_lineno + 1
    assert ask_for(caller) == f"tests/process/test_callsite.py:{line}"
    assert callsite._libraries == [f"{library}/"]


def test_a_thread_that_began_inside_has_no_line() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(caller).result() == "?"
    reported: list[str] = []
    thread = threading.Thread(target=lambda: reported.append(caller()))  # The lambda is in this file.
    thread.start()
    thread.join()
    assert reported[0].startswith("tests/process/test_callsite.py:")


def test_no_line_is_a_question_mark() -> None:
    assert format_site((None, 0)) == "?"
    assert format_site((compile("\n\nx = 1", "/a/b.py", "exec"), 4)) == "/a/b.py:3"


def test_a_file_is_shown_by_its_path_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app" / "bin").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "app")
    assert shown_path(f"{tmp_path}/app/__init__.py") == "__init__.py"
    assert shown_path(f"{tmp_path}/app/models/__init__.py") == "models/__init__.py"
    assert shown_path(f"{tmp_path}/other/run.py") == "../other/run.py"
    assert shown_path("/opt/run.py") == "/opt/run.py"
    assert shown_path("/usr/lib/python3/dist-packages/vllm/run.py") == "vllm/run.py"
    assert shown_path("<stdin>") == "<stdin>"
    monkeypatch.chdir(tmp_path / "app" / "bin")
    (tmp_path / "app" / "bin").rmdir()
    assert shown_path("/opt/run.py") == "/opt/run.py"


def test_a_command_of_preheat_is_a_program_with_a_name() -> None:
    code = compile("\n\nreturned = whom()", f"{callsite._HERE}tools/cli/compile.py", "exec")
    names = {"whom": call_site}
    exec(code, names)
    assert file_and_line(names["returned"]) == (code.co_filename, 3)  # type: ignore[arg-type]
    assert format_site(names["returned"]) == "preheat compile"  # type: ignore[arg-type]
    assert not callsite.is_user_file[f"{callsite._HERE}tools/cli/demo_steps/hot.py"]


def test_a_command_of_preheat_counts_as_the_program_and_is_shown_by_its_name() -> None:
    from preheat.tools.cli import bake

    code = compile("whom()", bake.__file__, "eval")
    site = eval(code, {"whom": call_site})
    assert format_site(site) == "preheat bake"
