"""The events of an audit belong to its owner: no other user can write, read or block them."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.adapters import imports
from preheat.audit import library
from preheat.audit.events import EventLog, lost_events, prepare_losses, read_events
from preheat.audit.images import read_loads
from preheat.audit.nested import hand_over
from preheat.errors import InputError
from tests.audit.conftest import Cli

Script = Callable[[str], list[str]]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
LINE = b'\n{"event": "compile", "time": 1.0, "pid": 7}\n'


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """The directory of an audit with one event."""
    place = tmp_path / "events"
    place.mkdir(mode=0o700)
    prepare_losses(place)
    (place / "7-0.jsonl").write_bytes(LINE)
    return place


def names(log: EventLog) -> list[str]:
    return [event.name for event in log.events]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to(path.with_name("7-0.jsonl"))


def make_second_name(path: Path) -> None:
    other = path.parent.parent / "other"
    other.write_bytes(LINE)
    os.link(other, path)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 << 30)


def make_foreign(path: Path) -> None:
    path.write_bytes(LINE)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    "make",
    [make_fifo, make_link, make_second_name, make_large, pytest.param(make_foreign, marks=needs_root)],
)
def test_a_file_that_is_not_of_the_audit_is_not_read(
    events: Path, make: Callable[[Path], None]
) -> None:
    make(events / "8-0.jsonl")
    log = read_events(events)
    assert (names(log), log.unread) == (["compile"], 1)


@pytest.mark.parametrize("path", ["/dev/zero", "fifo", "sparse", "absent"])
def test_an_image_that_cannot_be_read_has_no_digest(events: Path, path: str) -> None:
    place = Path(path) if path.startswith("/") else events / path
    if path == "fifo":
        os.mkfifo(place)
    if path == "sparse":
        make_large(place)
    line = f'{{"event": "load", "time": 1.0, "pid": 7, "kind": "cubin", "file": "{place}", "bytes": 0}}'
    (events / "7-0.jsonl").write_text(line)
    (load,) = read_loads(read_events(events), events)
    assert load.image.digest is None


def test_a_line_that_was_cut_does_not_hide_the_next_one(events: Path) -> None:
    with (events / "7-0.jsonl").open("ab") as file:
        file.write(b'\n{"event": "compi')
        file.write(LINE)
    log = read_events(events)
    assert (names(log), log.damaged) == (["compile"] * 2, 1)


def test_lines_begin_with_the_end_of_a_line(cli: Cli, script: Script) -> None:
    """Whatever an earlier write has left, a line stands alone."""
    assert cli("audit", "--keep", "kept", "--", *script("pass")).code == 0
    for path in Path("kept").glob("*.jsonl"):
        assert path.read_bytes().startswith(b"\n{")


def test_the_directory_is_private(cli: Cli, script: Script) -> None:
    code = "import os\nprint(oct(os.stat(os.environ['PREHEAT_AUDIT']).st_mode & 0o7777))\n"
    Path("kept").mkdir(mode=0o755)
    for options in ([], ["--keep", "kept"], ["--keep", "new"]):
        assert cli("audit", *options, "--", *script(code)).out == "0o700\n"


# Events that are lost


def test_a_lost_event_is_counted_and_does_not_hide_later_ones(
    cli: Cli, script: Script, tmp_path: Path
) -> None:
    """The process cannot write for a while. It is killed, so that it cannot report this later."""
    code = (
        "import os, resource, signal, subprocess\n"
        "limit = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))\n"
        "os.waitpid(os.posix_spawnp('tool', ['tool'], os.environ), 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, limit)\n"
        "subprocess.run(['nvcc', 'a.cu'])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = cli("audit", "--json", "--keep", "kept", "--", *script(code))
    assert [row["line"] for row in done.compilers] == ["app.py:6"]
    assert lost_events(tmp_path / "kept") >= 2  # the start of the tool, and its end
    assert done.report["unseen"][0].startswith("some events: a process could not write them (")


def test_losses_of_an_inner_audit_are_losses_of_the_outer_one(events: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    prepare_losses(outer)
    (events / "losses").write_bytes((3).to_bytes(4096, "little"))
    hand_over(events, outer)
    assert lost_events(outer) == 3
    assert names(read_events(outer)) == ["compile"]


def test_a_counter_that_is_gone_counts_as_a_loss(events: Path) -> None:
    assert lost_events(events) == 0
    (events / "losses").unlink()
    assert lost_events(events) == 1


@needs_root
def test_preheat_reports_to_the_audit_after_a_change_of_user(cli: Cli, script: Script) -> None:
    code = (
        "import os\n"
        "from preheat.model.events import audit_sink\n"
        "sink = audit_sink(os.environ)\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "sink('compile', {'program': 'k.cu', 'seconds': 1.0})\n"
    )
    done = cli("audit", "--json", "--", *script(code))
    assert [row["name"] for row in done.report["compiles"]] == ["k.cu"]
    assert done.report["unseen"] == []


# Paths that LD_PRELOAD and PYTHONPATH cannot hold


@pytest.fixture(params=[" ", ":", "\t", "$"])
def elsewhere(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the audit library, whose path LD_PRELOAD cannot hold."""
    place = tmp_path / f"a{request.param}b"
    place.mkdir()
    monkeypatch.setattr(library, "LIBRARY", Path(shutil.copy(library.LIBRARY, place)))
    return place


@pytest.mark.usefixtures("elsewhere")
def test_a_library_that_ld_preload_cannot_name_is_copied(cli: Cli, script: Script) -> None:
    """Every user can load the copy, and its owner alone can write beside it."""
    code = "import os\nprint(os.environ['PREHEAT_AUDIT_LIBRARY'], os.environ['PREHEAT_AUDIT'])\n"
    done = cli("audit", "--json", "--", *script("import subprocess\nsubprocess.run('nvcc')\n"))
    assert len(done.compilers) == 1
    with library.loadable_library() as copy:
        assert not set(str(copy)) & set(": \t$")
        modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (copy, copy.parent)]
    assert modes == [0o755, 0o755]
    assert not copy.parent.exists()
    used, events = cli("audit", "--", *script(code)).out.split()
    assert Path(used).parent not in (Path(events), *Path(events).parents)


def test_a_library_that_cannot_be_copied_to_a_better_path_is_an_error(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with pytest.raises(InputError, match="LD_PRELOAD can hold neither"), library.loadable_library():
        pass


def test_a_package_with_a_colon_in_its_path_starts_no_command(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the path would be another directory of Python modules."""
    monkeypatch.setattr(imports, "_SITE", "/opt/a:b/site")
    for command in ("audit", "run", "record"):
        done = cli(command, "--", *script("print('ran')"))
        assert done.code in (1, 2)
        assert done.out == ""
        assert "PYTHONPATH cannot hold a path with a colon" in done.err


def test_cupti_in_a_path_with_a_colon_is_not_used(tmp_path: Path) -> None:
    home = tmp_path / "a:b"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcupti.so.13").touch()
    env = {"CUDA_HOME": str(home), "PATH": os.environ["PATH"]}
    made = library.audited_environment(env, tmp_path, library.LIBRARY).env
    assert str(home) not in made["PREHEAT_AUDIT_CUPTI"]
    assert made["PREHEAT_AUDIT_LIBRARY"] == str(library.LIBRARY)
