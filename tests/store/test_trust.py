"""Which directories may hold code, and which of several candidates is used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from preheat.model.config import Config
from preheat.model.events import Events
from preheat.store.trust import DistrustedError, distrust_reason, first_usable, make_private
from tests.conftest import Recorder
from tests.store.support import NOBODY, needs_root, tmpfs


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "directory"
    path.mkdir(mode=0o700)
    return path


# Making


def test_a_directory_is_made_with_its_parents_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3


def test_a_directory_that_is_there_is_left_as_it_is(directory: Path) -> None:
    directory.chmod(0o750)
    make_private(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750


def test_another_process_making_the_same_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def made_twice(path: str, mode: int, *, dir_fd: int) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        mkdir(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", made_twice)
    make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("obstacle", ["file", "dangling link"])
def test_something_else_in_its_place_is_an_error(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "path"
    path.write_bytes(b"") if obstacle == "file" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError):
        make_private(path)
    assert not (tmp_path / "nowhere").exists()


# Trust


def test_my_own_private_directory_is_trusted(directory: Path) -> None:
    assert distrust_reason(directory) is None


@needs_root
def test_the_directory_of_another_user_is_not_trusted(directory: Path) -> None:
    os.chown(directory, NOBODY, 0)
    why = distrust_reason(directory)
    assert why is not None
    assert f"belongs to user {NOBODY}" in why
    assert "PREHEAT_TRUST_CACHE_DIR=1" in why


@needs_root
def test_the_directory_of_root_is_trusted_by_everyone(directory: Path) -> None:
    assert distrust_reason(directory, me=NOBODY) is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o770, 0o777, 0o1777])
def test_a_directory_that_others_can_write_is_not_trusted(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    why = distrust_reason(directory)
    assert why is not None
    assert f"mode {mode:04o}" in why
    assert "PREHEAT_TRUST_CACHE_DIR=1" in why


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o500])
def test_a_directory_that_others_can_only_read_is_trusted(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    assert distrust_reason(directory) is None


def test_my_own_link_is_trusted(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    assert distrust_reason(tmp_path / "link") is None


@needs_root
def test_a_link_that_another_user_planted_is_not_trusted(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    os.lchown(link, NOBODY, 0)
    why = distrust_reason(link)
    assert why is not None
    assert why.startswith(f"{link} is a symbolic link owned by user {NOBODY}")


@needs_root
def test_a_planted_link_further_up_is_not_trusted(directory: Path, tmp_path: Path) -> None:
    (directory / "inner").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(directory)
    os.lchown(tmp_path / "link", NOBODY, 0)
    assert distrust_reason(tmp_path / "link" / "inner") is not None


@needs_root
@pytest.mark.parametrize("relative", [False, True])
def test_a_planted_link_that_my_own_link_leads_through_is_not_trusted(
    directory: Path, tmp_path: Path, relative: bool
) -> None:
    (directory / "inner").mkdir(mode=0o700)
    (tmp_path / "planted").symlink_to(directory)
    os.lchown(tmp_path / "planted", NOBODY, 0)
    target = Path("planted/inner") if relative else tmp_path / "planted" / "inner"
    (tmp_path / "mine").symlink_to(target)
    why = distrust_reason(tmp_path / "mine")
    assert why is not None
    assert "planted is a symbolic link" in why


@needs_root
def test_what_a_link_leads_to_is_what_must_be_private(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    os.chown(directory, NOBODY, 0)
    assert distrust_reason(tmp_path / "link") is not None


# Links and directories above the cache


@pytest.fixture
def below(directory: Path) -> Path:
    path = directory / "above" / "below"
    path.mkdir(mode=0o700, parents=True)
    return path


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711, 0o1777, 0o1775, 0o3777])
def test_directories_above_may_be_read_by_all_and_written_with_a_sticky_bit(
    below: Path, mode: int
) -> None:
    below.parent.chmod(mode)
    assert distrust_reason(below) is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o2775])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_directory_above_that_others_can_write_is_not_trusted(
    below: Path, mode: int, levels: int
) -> None:
    above = below.parents[levels - 1]
    above.chmod(mode)
    why = distrust_reason(below)
    assert why is not None
    assert f"others can write to {above}, above it (mode {mode:04o})" in why


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_a_directory_above_of_another_user_is_not_trusted(below: Path, mode: int) -> None:
    below.parent.chmod(mode)
    os.chown(below.parent, NOBODY, 0)
    why = distrust_reason(below)
    assert why is not None
    assert f"{below.parent}, above it, belongs to user {NOBODY}" in why


@needs_root
@pytest.mark.parametrize(("above", "trusted"), [(0o755, True), (0o1777, False)])
def test_in_a_container_that_does_not_map_root_nobody_may_own_what_is_above(
    below: Path, monkeypatch: pytest.MonkeyPatch, above: int, trusted: bool
) -> None:
    os.chown(below.parent, NOBODY, 0)
    below.parent.parent.chmod(above)
    monkeypatch.setattr("preheat.store.trust._unmapped", lambda: NOBODY)
    assert (distrust_reason(below) is None) == trusted
    os.chown(below, NOBODY, 0)
    assert distrust_reason(below) is not None, "but never the directory itself"


def test_nothing_is_made_in_a_directory_that_is_not_trusted(below: Path) -> None:
    below.chmod(0o777)
    with pytest.raises(DistrustedError, match="others can write"):
        make_private(below / "a" / "b")
    assert list(below.iterdir()) == []


def test_a_way_through_a_circle_of_links_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        distrust_reason(tmp_path / "a" / "c")


def test_links_with_dots_lead_where_the_system_says(directory: Path, tmp_path: Path) -> None:
    (directory / "inner").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("directory/./inner/../inner")
    assert distrust_reason(tmp_path / "link") is None
    make_private(tmp_path / "link" / "new")
    assert (directory / "inner" / "new").is_dir()


def test_no_descriptor_is_left_open(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        distrust_reason(tmp_path / "link")
        make_private(tmp_path / "link" / "a")
        with pytest.raises(NotADirectoryError):
            make_private(_file(tmp_path) / "x")
    assert len(os.listdir("/proc/self/fd")) == before


def _file(place: Path) -> Path:
    (place / "a-file").touch()
    return place / "a-file"


@needs_root
def test_a_directory_that_was_good_and_is_another_now_is_checked_again(directory: Path) -> None:
    make_private(directory)
    directory.rmdir()
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, 0)
    with pytest.raises(DistrustedError, match="belongs to user"):
        make_private(directory)


# Choosing


def test_the_first_candidate_is_made_and_taken(tmp_path: Path, events: Events) -> None:
    candidates = [tmp_path / "a" / "cache", tmp_path / "b"]
    assert first_usable(candidates, events) == tmp_path / "a" / "cache"
    assert not (tmp_path / "b").exists()


def test_each_candidate_passed_over_is_one_event(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    candidates = [tmp_path / "file" / "below", tmp_path / "file", tmp_path / "open", tmp_path / "good"]
    assert first_usable(candidates, events) == tmp_path / "good"
    assert [event["path"] for event in recorder.named("refused")] == list(map(str, candidates[:3]))
    reasons = [event["reason"] for event in recorder.named("refused")]
    assert "cannot be created" in reasons[0]
    assert "is not a directory" in reasons[1]
    assert "others can write to it" in reasons[2]


def test_a_read_only_candidate_falls_through_with_one_event(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    with tmpfs(tmp_path / "mount", "size=64k,ro,mode=700") as mount:
        assert first_usable([mount, mount / "new", tmp_path / "good"], events) == tmp_path / "good"
    reasons = [event["reason"] for event in recorder.named("refused")]
    assert reasons[0] == "it is not writable"
    assert "Read-only" in reasons[1]


def test_an_empty_list_of_candidates_gives_none(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    (tmp_path / "file").write_bytes(b"")
    assert first_usable([tmp_path / "file"], events) is None
    assert len(recorder.named("refused")) == 1
    assert first_usable([], events) is None


@needs_root
def test_the_override_takes_a_shared_directory(directory: Path, events: Events) -> None:
    os.chown(directory, NOBODY, 0)
    directory.chmod(0o777)
    assert first_usable([directory], events, trust=True) == directory


# Candidates from the environment


def candidates(**env: str) -> list[str]:
    return [str(path) for path in Config.from_env(env).cache_dirs]


TEMPORARY = f"/tmp/preheat-{os.getuid()}/cache"
HOME = "/home/u/.cache/preheat"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [TEMPORARY]),
        ({"HOME": "/home/u"}, [HOME, TEMPORARY]),
        ({"HOME": ""}, [TEMPORARY]),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/xdg"}, ["/xdg/preheat", HOME, TEMPORARY]),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": ""}, [HOME, TEMPORARY]),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "cache"}, [HOME, TEMPORARY]),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "./cache"}, [HOME, TEMPORARY]),
        ({"HOME": "/home/u", "PREHEAT_CACHE_DIR": "/mine"}, ["/mine", HOME, TEMPORARY]),
        ({"HOME": "/home/u", "PREHEAT_CACHE_DIR": ""}, [HOME, TEMPORARY]),
        (
            {"HOME": "/home/u", "XDG_CACHE_HOME": "/xdg", "PREHEAT_CACHE_DIR": "/mine"},
            ["/mine", "/xdg/preheat", HOME, TEMPORARY],
        ),
        ({"TMPDIR": "/scratch"}, [f"/scratch/preheat-{os.getuid()}/cache"]),
        ({"TMPDIR": ""}, [TEMPORARY]),
    ],
)
@pytest.mark.skipif("sys.platform == 'darwin'", reason="the user's cache directory is elsewhere there")
def test_candidates_come_in_the_order_of_how_much_the_user_meant_them(
    env: dict[str, str], expected: list[str]
) -> None:
    assert candidates(**env) == expected


def test_a_relative_cache_directory_means_the_same_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert candidates(PREHEAT_CACHE_DIR="here")[0] == str(tmp_path / "here")


def test_an_unusable_setting_falls_through_to_the_users_cache(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    (tmp_path / "file").write_bytes(b"")
    env = {"PREHEAT_CACHE_DIR": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert first_usable(Config.from_env(env).cache_dirs, events) == tmp_path / "xdg" / "preheat"
    assert len(recorder.named("refused")) == 1
