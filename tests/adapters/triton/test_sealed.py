"""Sealed processes of Triton: errors that say what is missing, who asked, and what is there instead."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from tests.adapters.triton.world import PRELUDE, World

# Kernels of a few instructions. The tests are about what is found.
SMALL = "k.fill[(1,)](o, MODE=7)\n"


def test_a_missing_kernel_names_function_variant_line_and_the_nearest_one(baked: World) -> None:
    code = "k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=2048, num_warps=8)\n"
    ran = baked.sibling("missing").attempt(code, sealed=baked.root / "kernels.heat")
    assert ran.code == 1
    line = PRELUDE.count("\n") + 1
    message = ran.err[ran.err.index("preheat.errors.SealedError: ") :].splitlines()
    assert message[0] == (
        f"preheat.errors.SealedError: program0.py:{line}: triton kernels:add (sm_90) cannot be "
        "compiled in this sealed process: it is in no bundle and in no cache"
    )
    assert message[1].startswith("  searched ../kernels.heat, which has triton kernels:add for ")
    nearest = re.fullmatch(r"  most similar: (.*) \([0-9a-f]{12}\); the request differs in", message[2])
    assert nearest is not None
    assert set(nearest[1].split(", ")) >= {
        *("arch: sm_90", "BLOCK: constant 1024", "alpha: fp32"),
        *("n: i32", "divisible by 16", "x_ptr: *fp32"),
    }
    assert message[3:5] == [
        "    BLOCK: constant 1024 became constant 2048",
        "    num_warps: not set became 8",
    ]
    assert ran.compilers == []


def test_a_function_without_any_variant_is_named_alone(baked: World) -> None:
    ran = baked.sibling("unknown").attempt(SMALL, sealed=baked.root / "kernels.heat")
    assert ran.code == 1
    assert "triton kernels:fill (sm_90) cannot be compiled in this sealed process" in ran.err
    assert "most similar" not in ran.err
    assert "weak" not in ran.err


@pytest.mark.parametrize("weak", ["1", "0"])
@pytest.mark.parametrize("launch", ["k.fill[(1,)](o, MODE=8)", "k.tuned[(8,)](x, 8192)"])
def test_a_missing_kernel_is_one_error_without_frames_of_preheat(
    baked: World, launch: str, weak: str
) -> None:
    place = baked.sibling(f"frames-{launch[2:6]}-{weak}")
    settings = {"sealed": baked.root / "kernels.heat", "PREHEAT_WEAK_KERNELS": weak}
    ran = place.attempt(launch, **settings)
    assert ran.code == 1
    assert ran.err.count("Traceback (most recent call last)") == 1
    assert "During handling" not in ran.err
    assert "MissedError" not in ran.err
    assert frames_of_preheat(ran.err) == []
    ran = place.attempt(launch, **settings, PREHEAT_TRACEBACK="full")
    assert ran.err.count("Traceback (most recent call last)") == 1
    assert {"_permit", "permit"} < set(frames_of_preheat(ran.err))


def frames_of_preheat(text: str) -> list[str]:
    """Return the functions of preheat in a printed traceback."""
    return re.findall(r'^  File ".*/preheat/.*", line \d+, in (\S+)$', text, re.MULTILINE)


def test_an_architecture_that_was_not_baked_is_said(baked: World) -> None:
    code = "k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)\n"
    ran = baked.sibling("arch").attempt(code, cc=80, sealed=baked.root / "kernels.heat")
    assert ran.code == 1
    assert "triton kernels:add (sm_80) cannot be compiled" in ran.err
    assert "    arch: sm_90 became sm_80" in ran.err or "    arch: sm_100 became sm_80" in ran.err


def test_a_sealed_process_refuses_to_compile_always(baked: World) -> None:
    place = baked.sibling("always")
    code = "k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)\n"
    ran = place.attempt(code, sealed=baked.root / "kernels.heat", TRITON_ALWAYS_COMPILE="1")
    assert ran.code == 1
    assert "SealedError" in ran.err
    assert "TRITON_ALWAYS_COMPILE is set" in ran.err
    assert ran.compilers == []


def test_always_compiling_compiles_and_stores_where_the_process_is_not_sealed(world: World) -> None:
    assert world.run(SMALL).stats["compiles"] >= 2  # with host code
    assert world.run(SMALL, TRITON_ALWAYS_COMPILE="1").stats["compiles"] == 1
    assert "compiles" not in world.run(SMALL).stats


def test_a_process_that_is_sealed_with_a_warning_compiles(world: World) -> None:
    ran = world.run(SMALL, PREHEAT_SEALED="warn")
    assert ran.stats["compiles"] >= 2
    assert ran.stats["sealed"] >= 1
    assert "triton kernels:fill for sm_90 is compiled although this process is sealed" in ran.err


# Tuning

TUNED = "k.tuned[(8,)](x, 8192)\nprint(len(k.benchmarks), k.tuned.best_config.kwargs)\n"


def test_a_result_of_tuning_is_stored_found_and_baked(world: World) -> None:
    first = world.run(TUNED)
    assert first.out.splitlines()[0] == "2 {'BLOCK': 512}"
    second = world.sibling("second")
    ran = second.run(TUNED, PREHEAT_CACHE_DIR=str(world.cache))
    assert ran.out.splitlines()[0] == "0 {'BLOCK': 512}"
    assert len(ran.launches) == 1
    assert "compiles" not in ran.stats

    # The same without a change of the application, which records the winner and the result.
    program = world.root / "serve.py"
    program.write_text(
        "import kernels as k\nfrom tensors import Tensor\n"
        'if __name__ == "__main__":\n    k.tuned[(8,)](Tensor("fp32"), 8192)\n'
    )
    manifest = world.record(str(program))
    text = manifest.read_text()
    assert 'name = "kernels:tuned tuned for (8192, ' in text
    bundle = world.root / "tuned.heat"
    world.preheat("bake", str(manifest), "-o", str(bundle)).ok()
    sealed = world.sibling("sealed")
    ran = sealed.run(TUNED, sealed=bundle)
    assert ran.out.splitlines()[0] == "0 {'BLOCK': 512}"
    assert ran.compilers == []

    missing = sealed.attempt(TUNED.replace("8192", "4096"), sealed=bundle)
    assert missing.code == 1
    line = PRELUDE.count("\n") + 1
    assert re.search(
        rf"SealedError: program\d\.py:{line}: triton kernels:tuned tuned for \(4096, .*\) \(sm_90\) "
        r"cannot be measured in this sealed process: its result is in no bundle and in no cache; there "
        r"are results for \(8192, 'fp32'\)\n  searched \S*tuned\.heat, which does not have triton "
        r"kernels:tuned tuned for \(4096, 'fp32'\)\nhint: record a launch with these values on a GPU "
        "of sm_90, and bake",
        missing.err,
    )


def test_missing_host_code_is_named_with_the_line_of_the_program(world: World) -> None:
    ran = world.attempt(SMALL, PREHEAT_SEALED="1")
    assert ran.code == 1
    line = PRELUDE.count("\n") + 1
    assert (
        f"SealedError: program0.py:{line}: triton host code cuda_utils (any) cannot be compiled in "
        "this sealed process: it is in no bundle and in no cache" in ran.err
    )
    assert frames_of_preheat(ran.err) == []
    assert ran.compilers == []


UNSTORED = """
import triton.language as tl

@triton.autotune(
    configs=[triton.Config({"BLOCK": block, "DT": tl.float32}) for block in (64, 128)],
    key=["n"], do_bench=lambda call, quantiles: [call() and 1.0] * 3 or [1.0] * 3,
)
@triton.jit
def typed(x_ptr, n, BLOCK: tl.constexpr, DT: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, (tl.load(x_ptr + at, mask=at < n) * 2).to(DT), mask=at < n)

typed[(1,)](x, 64)
print("tuned")
"""


def test_a_result_of_tuning_that_json_cannot_hold_is_measured_by_each_process(world: World) -> None:
    """Triton alone measures it as well, because nobody asked for its cache of results."""
    for _ in range(2):
        ran = world.run(UNSTORED)
        assert ran.out.startswith("tuned")
        assert ran.stats["uncached"] == 1


UNWRITABLE = """
import os
faults = []
preheat.default_builder().events.subscribe(lambda name, fields: faults.append(fields), "fault")
k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)
k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)
print([fault["where"] for fault in faults], "NotADirectoryError" in faults[0]["error"], flush=True)
if not (child := os.fork()):
    raise SystemExit  # The directory belongs to the parent.
os.waitpid(child, 0)
print(os.listdir(os.environ["TMPDIR"])[0][:15])
"""


def test_a_sealed_process_that_cannot_write_triton_s_directory_starts(baked: World) -> None:
    place = baked.sibling("unwritable")
    (place.root / "file").touch()
    (temporary := place.root / "tmp").mkdir()
    home = str(place.root / "file" / "cache")  # No directory can be made below a file.
    ran = place.run(
        UNWRITABLE, sealed=baked.root / "kernels.heat", TRITON_CACHE_DIR=home, TMPDIR=str(temporary)
    )
    assert ran.out.splitlines()[0] == f"[{home!r}] True"
    assert ran.out.splitlines()[-2] == "preheat-triton-"
    assert [name for name, *_ in ran.launches] == ["add", "add"]
    assert ran.compilers == []
    assert list(temporary.iterdir()) == []


REFUSED = """
refused = []
preheat.default_builder().events.subscribe(lambda name, fields: refused.append(fields), "refused")
k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)
k.add[(4,)](x, y, o, 4097, 1.5, BLOCK=1024)
print([each["path"] for each in refused], refused and refused[0]["reason"])
print([line.split()[-1] for line in open("/proc/self/maps") if "/cuda_utils" in line])
"""


@pytest.mark.parametrize("whose", ["of another user", "writable for all", "with a writable parent"])
def test_files_are_not_loaded_from_a_directory_that_others_can_write(baked: World, whose: str) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory to another user")
    place = baked.sibling(whose.replace(" ", "-"))
    parent = place.root / "shared"
    directory = parent / "triton"
    directory.mkdir(parents=True)
    {
        "of another user": lambda: os.chown(directory, 12345, 12345),
        "writable for all": lambda: directory.chmod(0o777),
        "with a writable parent": lambda: parent.chmod(0o777),
    }[whose]()
    bundle = baked.root / "kernels.heat"
    ran = place.run(REFUSED, sealed=bundle, TRITON_CACHE_DIR=str(directory))
    assert ran.out.splitlines()[0].startswith(f"[{str(directory)!r}] ")
    expected = "belongs to user 12345" if whose == "of another user" else "mode 0777"
    assert expected in ran.out.splitlines()[0]
    assert "preheat-triton-" in ran.out.splitlines()[1]
    assert str(directory) not in ran.out.splitlines()[1]
    assert list(directory.iterdir()) == []
    # Whoever trusts everybody says so.
    settings = {"TRITON_CACHE_DIR": str(directory), "PREHEAT_TRUST_CACHE_DIR": "1"}
    ran = place.run(REFUSED, sealed=bundle, **settings)
    assert ran.out.splitlines()[0] == "[] []"
    assert str(directory) in ran.out.splitlines()[1]


def test_a_file_that_others_can_write_is_replaced(baked: World) -> None:
    place = baked.sibling("replaced")
    directory = place.root / "triton"
    code = "k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)\n"
    settings = {"sealed": baked.root / "kernels.heat", "TRITON_CACHE_DIR": str(directory)}
    place.run(code, **settings)
    files = [file for file in directory.rglob("*") if file.is_file()]
    for file in files:
        file.chmod(0o666)
    place.run(code, **settings)
    assert files
    assert not [file for file in files if file.stat().st_mode & 0o022]
