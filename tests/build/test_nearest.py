"""The stored artifact that is nearest to a request: the one with the fewest differing parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from preheat.build.refusal import choose_nearest
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.key import Key, explain, request_key
from preheat.model.program import Program

WANTED = Program.of("__global__ void k() {}", label="k.cu", options=["-a", "-b"])
requests = st.builds(
    lambda source, arch, **more: (Program.of(source, **more), Arch.parse(arch)),
    st.sampled_from([WANTED.source, "__global__ void other() {}"]),
    st.sampled_from(["sm_80", "sm_90", "sm_90a", "sm_100"]),
    label=st.sampled_from(["k.cu", "other.cu"]),
    options=st.lists(st.sampled_from(["-a", "-b", "-c"]), max_size=4),
    names=st.lists(st.sampled_from(["k", "tk<int>"]), max_size=2),
    headers=st.dictionaries(st.sampled_from(["x.h", "y.h"]), st.sampled_from(["1", "2"]), max_size=2),
)


def stored(program: Program, arch: Arch) -> Artifact:
    key = request_key(program, arch, "nvrtc 1")
    return Artifact(key.digest, program.label, arch, "NVRTC", key.table, (), b"", b"")


def wanted() -> Key:
    return request_key(WANTED, Arch.parse("sm_90"), "nvrtc 1")


@given(st.lists(requests, min_size=1, max_size=8))
def test_no_stored_artifact_differs_in_fewer_parts_than_the_nearest(
    kept: list[tuple[Program, Arch]],
) -> None:
    artifacts = [stored(*each) for each in kept]
    near = choose_nearest(wanted().table, WANTED.label, artifacts)
    assert near is not None
    differing = [len(explain(artifact.parts, wanted())) for artifact in artifacts]
    assert near.differences == explain(near.artifact.parts, wanted())
    assert len(near.differences) == min(differing)
    tied = [a for a, number in zip(artifacts, differing, strict=True) if number == min(differing)]
    assert near.artifact.label == WANTED.label or not any(a.label == WANTED.label for a in tied)


def test_of_several_as_near_the_namesake_then_the_closest_architecture_then_the_first_is_taken() -> (
    None
):
    def with_options(label: str, arch: str, option: str) -> Artifact:
        program = Program.of(WANTED.source, label=label, options=["-a", option])
        return stored(program, Arch.parse(arch))

    other = with_options("other.cu", "sm_90", "-b")
    far, close = with_options("k.cu", "sm_120", "-b"), with_options("k.cu", "sm_100", "-b")
    first, second = with_options("k.cu", "sm_90", "-c"), with_options("k.cu", "sm_90", "-d")
    for kept, expected in (
        ([other, far], far),
        ([far, close], close),
        ([first, second], first),
        ([second, first, far, other], second),
    ):
        near = choose_nearest(wanted().table, WANTED.label, kept)
        assert near is not None
        assert near.artifact is expected


def test_nothing_stored_has_no_nearest() -> None:
    assert choose_nearest(wanted().table, WANTED.label, []) is None
