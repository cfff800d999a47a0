"""Mounted bundles: replaced, refused, damaged, and not accepted by a device."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.build.lookup import Miss
from preheat.build.seal import sealed
from preheat.emulator.device import EmulatorDevice
from preheat.errors import (
    BundleError,
    SealedError,
    WarmError,
)
from preheat.gpu import Gpu
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.events import Events, log_events
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.model.key import bundle_key
from preheat.store.bundle import Bundle, write
from preheat.store.trust import open_file
from tests.build.sealed import PLAIN, Baked, recorded
from tests.conftest import Recorder

# Mounting


def test_a_bundle_is_mounted_once_and_its_successor_takes_its_place(
    baked: Baked, builder: Builder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.heat"
    copy.write_bytes(baked.path.read_bytes())
    first, last = builder.mount(copy), builder.mount(baked.path)
    assert builder.mount(copy) is first
    write(copy, {}, {})
    successor = builder.mount(copy)
    assert builder.bundles == (successor, last)
    assert first.get(next(first.digests()))  # Open bundles can still be read.


def test_a_bundle_replaced_between_opening_and_looking_is_mounted_again(
    baked: Baked, builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.heat"
    copy.write_bytes(baked.path.read_bytes())

    def opened_then_replaced(path: Path, *, trust: bool) -> int:
        descriptor = open_file(path, trust=trust)
        write(copy, {}, {})
        return descriptor

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("preheat.store.bundle.open_file", opened_then_replaced)
        assert len(builder.mount(copy)) > 0
    assert len(builder.mount(copy)) == 0


def test_a_bundle_that_others_can_write_is_refused(
    baked: Baked, builder: Builder, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open.heat"
    open_to_all.write_bytes(baked.path.read_bytes())
    open_to_all.chmod(0o666)
    with pytest.raises(BundleError, match=r"cannot be trusted: others can write to it \(mode 0666\)"):
        builder.mount(open_to_all)
    assert builder.bundles == ()


def test_a_bundle_of_the_settings_that_cannot_be_used_is_an_event(
    bare: Callable[..., Builder], tmp_path: Path
) -> None:
    (tmp_path / "bad.heat").write_bytes(b"not a bundle")
    builder = bare(bundles=(tmp_path / "bad.heat", tmp_path / "no.heat"))
    assert [Path(row["path"]).name for row in recorded(builder, "refused")] == ["bad.heat", "no.heat"]


UNUSABLE = {
    "missing": (None, "cannot be read: No such file or directory", "copy the file to this place again"),
    "empty": (
        lambda whole: whole[:0],
        "is not a valid bundle: it is too short",
        "copy the bundle again",
    ),
    "truncated": (lambda whole: whole[:-1], "it is cut short", "copy the bundle again"),
    "damaged": (
        lambda whole: whole[:30] + bytes([whole[30] ^ 1]) + whole[31:],
        "the checksum of its index does not match",
        "copy the bundle again",
    ),
}


@pytest.mark.parametrize(("change", "reason", "hint"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_sealed_process_uses_nothing_while_a_bundle_of_its_settings_cannot_be_used(
    change: Callable[[bytes], bytes] | None,
    reason: str,
    hint: str,
    baked: Baked,
    bare: Callable[..., Builder],
    tmp_path: Path,
) -> None:
    bad = tmp_path / "bad.heat"
    if change is not None:
        bad.write_bytes(change(baked.path.read_bytes()))
    builder = bare(bundles=(bad, baked.path), sealed=SealMode.ERROR)
    request = ForeignRequest("mylib", "v1")
    uses: list[Callable[[], object]] = [
        lambda: builder.build(PLAIN, "sm_90"),  # The other bundle has it.
        lambda: builder.lookup(PLAIN, "sm_90"),
        lambda: builder.foreign.get(request),
        lambda: builder.foreign.obtain(request, dict),
        lambda: builder.foreign.permit(request, "absent: it is not there"),
    ]
    for use in uses:
        with pytest.raises(BundleError) as caught:
            use()
        assert str(bad) in str(caught.value)
        assert reason in str(caught.value)
        assert "this process is sealed" in str(caught.value)
        assert hint in str(caught.value.hint)
        assert "record" not in str(caught.value.hint)
    shutil.copy(baked.path, bad)
    builder.mount(bad)
    assert builder.build(PLAIN, "sm_90").cubin


def test_all_bundles_that_cannot_be_used_are_in_one_error(
    bare: Callable[..., Builder], tmp_path: Path
) -> None:
    builder = bare(bundles=(tmp_path / "a.heat", tmp_path / "b.heat"))
    with sealed(), pytest.raises(BundleError, match=r"a\.heat cannot be read") as caught:
        builder.build(PLAIN, "sm_90")
    (other,) = caught.value.others
    assert "b.heat cannot be read" in str(other)


@pytest.mark.parametrize("mode", [SealMode.OFF, SealMode.WARN])
def test_elsewhere_a_bundle_that_cannot_be_used_is_one_warning(
    mode: SealMode, config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, bundles=(tmp_path / "no.heat",), sealed=mode)
    builder = Builder.open(config)
    for name in ("first", "second"):
        assert builder.foreign.obtain(ForeignRequest("mylib", name), dict).files == {}
        assert isinstance(builder.lookup(PLAIN, "sm_90"), Miss)
    builder.close()
    warnings = [text for text in caplog.messages if "no.heat" in text]
    assert len(warnings) == 1
    assert "no.heat is not used: bundle" in warnings[0]


def test_a_damaged_entry_of_another_library_is_named_in_a_sealed_process(
    bare: Callable[..., Builder], tmp_path: Path
) -> None:
    entry = ForeignEntry("mylib", "v1", {"code": b"code"})
    write(tmp_path / "bad.heat", {entry.digest: entry.encode()}, {})
    whole = (tmp_path / "bad.heat").read_bytes()
    (tmp_path / "bad.heat").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    builder = bare(bundles=(tmp_path / "bad.heat",), sealed=SealMode.ERROR)
    with pytest.raises(SealedError, match=r"the entry in .*bad\.heat failed its check") as caught:
        builder.foreign.obtain(entry.request, dict)
    assert caught.value.hint == "copy the bundle again, and check it: preheat bundle verify FILE"


def test_a_damaged_entry_of_a_bundle_is_a_miss(
    baked: Baked, bare: Callable[..., Builder], tmp_path: Path
) -> None:
    whole = bytearray(baked.path.read_bytes())
    found = whole.find(b"saxpy.cu", len(whole) // 4)
    while found > 0:
        whole[found] ^= 1
        found = whole.find(b"saxpy.cu", found)
    (tmp_path / "bad.heat").write_bytes(whole)
    builder = bare(bundles=(tmp_path / "bad.heat",), sealed=SealMode.ERROR)
    with pytest.raises(SealedError, match=r"the entry in .*bad\.heat failed its check") as caught:
        builder.build(PLAIN, "sm_90")
    assert caught.value.hint == "copy the bundle again, and check it: preheat bundle verify FILE"
    assert recorded(builder, "damaged")


def test_a_bundle_that_cannot_be_read_is_the_reason_of_a_miss(
    baked: Baked, bare: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = bare(bundles=(baked.path,), sealed=SealMode.ERROR)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Bundle, "get", fail)
    with pytest.raises(SealedError, match=r"\.heat cannot be read: .*Input/output error") as caught:
        builder.build(PLAIN, "sm_90")
    assert "copy the bundle again" in str(caught.value.hint)
    assert recorded(builder, "fault")


def test_a_bundle_that_was_closed_is_mounted_again(baked: Baked, builder: Builder) -> None:
    with builder.mount(baked.path) as closed:
        pass
    assert closed.closed
    again = builder.mount(baked.path)
    assert again.get(next(again.digests()))
    assert builder.bundles == (again,)


def with_damage(baked: Baked, label: str, place: Path) -> Path:
    """Return a copy of the bundle in which the entry of one program is damaged and the code is not."""
    key = bundle_key(baked.programs[label], Arch.parse("sm_90")).digest
    with Bundle.open(baked.path) as bundle:
        promise = bundle.get(key)
    assert promise is not None
    bad = place / "bad.heat"
    bad.write_bytes(baked.path.read_bytes().replace(promise, bytes([*promise[:-1], promise[-1] ^ 1])))
    return bad


@pytest.mark.parametrize("label", ["saxpy.cu", "file.cu"])
def test_a_damaged_bundle_entry_hides_no_other(
    label: str, baked: Baked, bare: Callable[..., Builder], tmp_path: Path
) -> None:
    bad = with_damage(baked, label, tmp_path)
    builder = bare(bundles=(bad,), sealed=SealMode.ERROR)
    for program in baked.programs.values():
        with pytest.raises(SealedError) as refused:
            builder.build(replace(program, options=("-G",)), "sm_90")
        near = refused.value.nearest
        assert near is not None
        assert near.startswith(program.label) == (program.label != label)


def test_a_bundle_entry_is_written_again_where_a_bundle_has_a_damaged_one(
    baked: Baked, shared_builder: Builder, config: Config, recorder: Recorder, tmp_path: Path
) -> None:
    recorder.forgive = True
    program = baked.programs["file.cu"]
    bad = with_damage(baked, "file.cu", tmp_path)
    builder = Builder.open(replace(config, bundles=(bad,)), events=Events(recorder))
    assert (
        builder.bundle_entry(program, "sm_90")[0].encode()
        == shared_builder.bundle_entry(program, "sm_90")[0].encode()
    )
    builder.close()


def test_code_of_a_bundle_that_a_device_refuses_is_replaced_once(
    shared_builder: Builder, open_builder: Callable[..., Builder], config: Config, recorder: Recorder
) -> None:
    recorder.forgive = True
    promise = shared_builder.bundle_entry(PLAIN, "sm_90")[0]
    newer = replace(promise.artifact, digest="ab" * 32)  # as another compiler would have made it
    bundle = config.lock_dir.with_name("newer.heat")
    write(bundle, replace(promise, artifact=newer).encode(), {})
    config = replace(config, bundles=(bundle,))
    for process in range(2):
        builder = open_builder(config)
        assert builder.build(PLAIN, "sm_90").digest == newer.digest
        mended = builder.rebuild(PLAIN, "sm_90", reason="too new for this driver")
        assert mended.digest == promise.artifact.digest
        assert builder.build(PLAIN, "sm_90") == mended
        assert len(recorder.named("compile")) == 1, process
    with sealed():
        assert open_builder(config).rebuild(PLAIN, "sm_90", reason="too new") == mended
        with pytest.raises(SealedError, match="process: too new"):
            builder.rebuild(PLAIN, "sm_90", reason="too new")
    assert builder.build(PLAIN, "sm_90") == mended


NONSENSE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("promise", lambda meta: meta.update(entries="scale")),
    ("promise", lambda meta: meta.update(entries=[{}])),
    ("promise", lambda meta: meta.update(note=["why"])),
    ("promise", lambda meta: meta.update(include="{file}")),
    ("promise", lambda meta: meta.update(include=["{file}", 5])),
    ("promise", lambda meta: meta.update(states=[])),
    ("promise", lambda meta: meta["states"][0].update(entry=5)),
    ("promise", lambda meta: meta["states"][0].update(entry="00" * 32)),
    ("promise", lambda meta: meta["states"][0].update(headers=[[{}, "x.h", ""]])),
    ("promise", lambda meta: meta["states"][0].update(absent=[[[], "x.h"]])),
    ("promise", lambda meta: meta["states"][0].update(roots=[None])),
    ("code", lambda meta: meta.update(label=["file.cu"])),
    ("code", lambda meta: meta.update(toolchain=None)),
    ("code", lambda meta: meta.update(parts=[[{}, "1"]])),
    ("code", lambda meta: meta.update(headers=[["0", [], ""]])),
]


@pytest.mark.parametrize("case", range(len(NONSENSE)))
def test_invalid_data_under_a_right_checksum_is_a_damaged_entry(
    case: int,
    baked: Baked,
    shared_builder: Builder,
    open_builder: Callable[..., Builder],
    recorder: Recorder,
    tmp_path: Path,
) -> None:
    recorder.forgive = True
    (of, spoil) = NONSENSE[case]
    program = baked.programs["file.cu"]
    promise = shared_builder.bundle_entry(program, "sm_90")[0]
    entries = promise.encode()
    digest = promise.key if of == "promise" else promise.artifact.digest
    meta, sections = codec.unpack(digest, entries[digest])
    spoil(meta)
    write(tmp_path / "odd.heat", {**entries, digest: codec.pack(digest, meta, sections)}, {})
    builder = open_builder()
    builder.mount(tmp_path / "odd.heat")
    assert builder.explain_lookup(program, "sm_90") == Miss(
        f"damaged: the entry in {tmp_path / 'odd.heat'} failed its check"
    )
    assert builder.nearest(program, "sm_90") is None
    with Gpu(EmulatorDevice(0, "sm_90"), builder) as gpu, pytest.raises(WarmError):
        gpu.warm(tmp_path / "odd.heat")


def test_a_request_event_tells_of_every_program_that_is_returned(builder: Builder) -> None:
    seen: list[tuple[str, str, str]] = []

    def sink(_: str, fields: Mapping[str, Any]) -> None:
        seen.append((fields["program"].label, str(fields["arch"]), str(fields["artifact"].arch)))

    builder.events.subscribe(sink, "request")
    builder.build(PLAIN, "sm_80")
    builder.lookup(PLAIN, "sm_86")
    assert builder.lookup(PLAIN, "sm_86", exact=True).artifact is None
    assert seen == [("saxpy.cu", "sm_80", "sm_80"), ("saxpy.cu", "sm_86", "sm_80")]


# Bundles for other devices


def test_a_bundle_without_code_for_a_device_is_reported_once(
    tmp_path: Path, bare: Callable[..., Builder], caplog: pytest.LogCaptureFixture
) -> None:
    for name, archs in (("80", ["sm_80", "sm_75"]), ("90", ["sm_90"]), ("any", [])):
        write(tmp_path / f"{name}.heat", {}, {"archs": archs})
    builder = bare(bundles=(tmp_path / "80.heat", tmp_path / "any.heat"))
    for number in range(2):
        with Gpu(EmulatorDevice(number, "sm_90"), builder):
            builder.mount(tmp_path / "80.heat")
    path, why = str(tmp_path / "80.heat"), "it has code for sm_75 and sm_80, and emulator:0 is sm_90"
    assert recorded(builder, "refused") == [{"path": path, "reason": why}]
    with Gpu(EmulatorDevice(0, "sm_100"), builder):
        builder.mount(tmp_path / "90.heat")
    new = [Path(row["path"]).name for row in recorded(builder, "refused")[1:]]
    assert new == ["80.heat", "90.heat"]
    log = log_events()
    with caplog.at_level(logging.INFO, "preheat"):
        log("refused", {"path": path, "reason": why})
    assert caplog.messages == [f"{path} is not used: {why}"]


def test_a_bundle_is_not_compared_with_a_device_that_was_closed(
    tmp_path: Path, bare: Callable[..., Builder]
) -> None:
    write(tmp_path / "80.heat", {}, {"archs": ["sm_80"]})
    builder = bare()
    with Gpu(EmulatorDevice(0, "sm_75"), builder):
        pass
    builder.mount(tmp_path / "80.heat")
    assert recorded(builder, "refused") == []


def test_a_bundle_for_another_device_beside_one_for_this_device_is_not_reported(
    tmp_path: Path, bare: Callable[..., Builder]
) -> None:
    for arch in ("sm_80", "sm_90"):
        write(tmp_path / f"{arch}.heat", {}, {"archs": [arch]})
    builder = bare(bundles=(tmp_path / "sm_80.heat", tmp_path / "sm_90.heat"))
    with Gpu(EmulatorDevice(0, "sm_90"), builder):
        assert recorded(builder, "refused") == []
