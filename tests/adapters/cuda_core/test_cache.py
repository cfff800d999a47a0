"""`Program.compile(…, cache=preheat.adapters.cuda_core.cache())`: cuda.core's own way to a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import preheat.adapters.cuda_core
from preheat.build.builder import Builder
from preheat.errors import SealedError
from preheat.model.config import Config, SealMode
from tests.adapters.cuda_core.support import TEMPLATE, WITH_HEADER, core, program
from tests.conftest import Recorder

# A program that an error keeps alive ends in a cycle, and cuda.core 1.2 fails to deallocate it then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Use = Callable[[Builder], None]
OpenBuilder = Callable[..., Builder]


@pytest.fixture
def cache(builder: Builder, use: Use) -> Any:
    """Return a cache on the store of the test; other programs do not use it."""
    del use  # It restores what the test changes.
    return preheat.adapters.cuda_core.cache(builder)


def test_a_program_is_compiled_once_and_found_from_then_on(
    cache: Any, open_builder: OpenBuilder, compiled: list[Any], recorder: Recorder
) -> None:
    assert isinstance(cache, core.utils.ProgramCacheResource)
    codes = [program().compile("cubin", cache=cache) for _ in range(2)]
    other = preheat.adapters.cuda_core.cache(open_builder())
    codes.append(program().compile("cubin", cache=other))
    assert len({code.code for code in codes}) == 1
    assert len(compiled) == 1
    assert [each["tier"] for each in recorder.named("hit")] == ["memory", "disk"]
    assert len(recorder.named("compile")) == 1


def test_only_programs_that_pass_the_cache_use_it(cache: Any, compiled: list[Any]) -> None:
    program().compile("cubin")
    program().compile("cubin")
    assert len(compiled) == 2
    assert len(cache) == 0


def test_it_shares_entries_with_the_installed_adapter(
    cache: Any, use: Use, builder: Builder, compiled: list[Any]
) -> None:
    program().compile("cubin", cache=cache)
    use(builder)
    program().compile("cubin")
    assert (len(compiled), len(cache)) == (1, 1)


def test_a_header_that_cuda_core_does_not_see_counts(
    cache: Any, here: Path, compiled: list[Any]
) -> None:
    codes = []
    for value in ("2.0f", "3.0f", "2.0f"):
        (here / "scale.h").write_text(f"#define SCALE {value}\n")
        codes.append(program(WITH_HEADER).compile("cubin", cache=cache).code)
    assert codes[0] == codes[2] != codes[1]
    assert len(compiled) == 2


def test_what_no_key_describes_is_not_stored(
    cache: Any, compiled: list[Any], recorder: Recorder
) -> None:
    clock = "__device__ const char *made = __TIME__;"
    for _ in range(2):
        program(clock).compile("cubin", cache=cache)
    assert (len(compiled), len(cache)) == (2, 0)
    assert recorder.named("uncached")[0]["reason"] == "it uses __TIME__, which reads the clock"


def test_cuda_cores_own_rules_hold(cache: Any) -> None:
    with pytest.raises(ValueError, match="name_expressions"):
        program(TEMPLATE).compile("cubin", name_expressions=("fill<int>",), cache=cache)
    with pytest.raises(ValueError, match="include_path"):
        program(include_path="inc").compile("cubin", cache=cache)


def test_a_sealed_miss_names_the_kernel_and_the_line(
    open_builder: OpenBuilder, config: Config, compiled: list[Any], use: Use
) -> None:
    del use
    program().compile("cubin", cache=preheat.adapters.cuda_core.cache(open_builder()))
    sealed = preheat.adapters.cuda_core.cache(open_builder(replace(config, sealed=SealMode.ERROR)))
    program().compile("cubin", cache=sealed)
    with pytest.raises(SealedError, match=r"cuda_core saxpy of other \(sm_90\) cannot") as refused:
        program(name="other").compile("cubin", cache=sealed)
    assert refused.value.caller.startswith("tests/adapters/cuda_core/test_cache.py:")
    with pytest.raises(SealedError, match="it is in no bundle and in no cache"):
        sealed.get(b"a key of the program")
    assert len(compiled) == 1


def test_it_is_a_mapping_of_bytes(cache: Any) -> None:
    assert cache.get(b"key") is None
    with pytest.raises(KeyError):
        cache[b"key"]
    cache[b"key"] = b"code"
    cache["text"] = bytearray(b"more")
    assert (cache[b"key"], cache["key"], cache[b"text"], len(cache)) == (b"code", b"code", b"more", 2)
    del cache["key"]
    with pytest.raises(KeyError):
        del cache["key"]
    cache.update({b"key": memoryview(b"again")})
    assert cache[b"key"] == b"again"
    cache.clear()
    assert (len(cache), cache.get("text")) == (0, None)
    with pytest.raises(TypeError, match="bytes or text, not int"):
        cache[3]
    with cache as same:
        assert same is cache


def test_object_code_is_stored_by_its_content(cache: Any, tmp_path: Path) -> None:
    file = tmp_path / "code.cubin"
    file.write_bytes(b"content")
    cache[b"file"] = core.ObjectCode.from_cubin(str(file), name="mine")
    cache[b"bytes"] = core.ObjectCode.from_cubin(b"other")
    file.unlink()
    assert (cache[b"file"], cache[b"bytes"]) == (b"content", b"other")


def test_clearing_it_leaves_other_entries_alone(cache: Any, builder: Builder) -> None:
    from preheat.model.foreign import ForeignEntry

    builder.foreign.put(ForeignEntry("triton", "key", {"a": b"b"}))
    program().compile("cubin", cache=cache)
    cache.clear()
    assert [entry.kind for entry in builder.foreign.all()] == ["triton"]


def test_keys_with_a_digest_of_the_caller_are_the_callers(cache: Any, compiled: list[Any]) -> None:
    made = program(TEMPLATE, include_path="inc")
    key = core.utils.make_program_cache_key(
        code=TEMPLATE, code_type="c++", options=core.ProgramOptions(arch="sm_90"),
        target_type="cubin", extra_digest=b"mine",
    )  # fmt: skip
    assert cache.get(key) is None
    cache[key] = made.compile("cubin")
    assert cache.get(key) == made.compile("cubin").code
    assert len(compiled) == 2
