"""Programs of cuda.core: compiled once, found by every process, sealed, and as it compiles them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore
from preheat.errors import SealedError
from preheat.model.config import Config, SealMode
from tests.adapters.cuda_core.support import (
    NVVM,
    PTX,
    SAXPY,
    TEMPLATE,
    WITH_HEADER,
    core,
    options,
    program,
)
from tests.conftest import Recorder

# A program that an error keeps alive ends in a cycle, and cuda.core 1.2 fails to deallocate it then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Use = Callable[[Builder], None]
OpenBuilder = Callable[..., Builder]


def test_a_program_is_compiled_once_and_found_from_then_on(
    use: Use, open_builder: OpenBuilder, compiled: list[Any], recorder: Recorder
) -> None:
    use(open_builder())
    first = program().compile("cubin")
    again = program().compile("cubin")
    use(open_builder())  # another process
    other = program().compile("cubin")
    assert len(compiled) == 1
    assert first.code == again.code == other.code
    assert first.code.startswith(b"\x7fELF")
    assert (other.code_type, other.name, other.symbol_mapping) == ("cubin", "default_program", {})
    assert [each["tier"] for each in recorder.named("hit")] == ["memory", "disk"]
    (miss,) = recorder.named("miss")
    assert miss["program"] == "cuda_core saxpy"
    assert miss["arch"] == "sm_90"


def test_a_program_that_was_made_before_the_adapter_is_found(
    use: Use, builder: Builder, compiled: list[Any]
) -> None:
    early, late = program(), program()
    use(builder)
    assert early.compile("cubin").code == late.compile("cubin").code
    assert len(compiled) == 1


def test_stored_code_is_what_cuda_core_compiles(store: ForeignStore, compiled: list[Any]) -> None:
    names = ("fill<float>", b"fill<int>")
    plain = program(TEMPLATE, name="mine").compile("cubin", name_expressions=names)
    stored = program(TEMPLATE, name="mine").compile("cubin", name_expressions=list(names))
    assert len(compiled) == 1
    from preheat.adapters.cuda_core.compile import compile_by_cuda_core

    real = compile_by_cuda_core(program(TEMPLATE, name="mine"), "cubin", names, None)
    for code in (plain, stored):
        assert (code.name, code.code_type, code.code) == ("mine", "cubin", real.code)
        assert code.symbol_mapping == real.symbol_mapping
    assert {*real.symbol_mapping} == {"fill<float>", b"fill<int>"}
    assert store.sealed is SealMode.OFF


def test_a_hit_writes_the_log_of_the_compile(store: ForeignStore, compiled: list[Any]) -> None:
    warned = SAXPY + "\n__device__ int unused() { int never; return 3; }"
    logs = [io.StringIO() for _ in range(2)]
    for log in logs:
        program(warned).compile("cubin", logs=log)
    assert len(compiled) == 1
    assert "never" in logs[0].getvalue()
    assert logs[0].getvalue() == logs[1].getvalue()
    assert len(list(store.all("cuda_core"))) == 1


def test_an_empty_log_is_not_written(store: ForeignStore) -> None:
    log = io.StringIO()
    for _ in range(2):
        program().compile("cubin", logs=log)
    assert log.getvalue() == ""
    (entry,) = store.all("cuda_core")
    assert [*entry.files] == ["code", "ptx"]


def test_programs_of_ptx_are_stored(store: ForeignStore, compiled: list[Any]) -> None:
    codes = [core.Program(PTX, "ptx", options()).compile("cubin").code for _ in range(2)]
    assert codes[0] == codes[1]
    assert len(compiled) == 1
    (entry,) = store.all("cuda_core")
    assert (entry.label, str(entry.arch)) == ("empty", "sm_90")


def test_programs_of_nvvm_are_stored(store: ForeignStore, compiled: list[Any]) -> None:
    try:
        codes = [core.Program(NVVM, "nvvm", options()).compile("ptx").code for _ in range(2)]
    except RuntimeError as missing:
        pytest.skip(f"NVVM is not installed: {missing}")
    assert codes[0] == codes[1]
    assert b".entry simple" in codes[0]
    assert len(compiled) == 1
    assert len(list(store.all("cuda_core"))) == 1


def test_ltoir_is_stored(store: ForeignStore, compiled: list[Any]) -> None:
    codes = [program(link_time_optimization=True).compile("ltoir") for _ in range(2)]
    assert codes[0].code == codes[1].code
    assert codes[1].code.startswith(b"\xed\x43\x4e\x7f")
    assert (codes[1].code_type, len(compiled)) == ("ltoir", 1)
    assert len(list(store.all("cuda_core"))) == 1


def test_a_rejected_program_is_cuda_cores_error_and_is_tried_again(
    store: ForeignStore, compiled: list[Any]
) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match=r"undefined_name\W is undefined") as refused:
            program('extern "C" __global__ void k() { undefined_name = 1; }').compile("cubin")
        assert type(refused.value).__module__.startswith("cuda.core")
    assert len(compiled) == 2
    assert not list(store.all())


def test_wrong_arguments_are_cuda_cores_errors(store: ForeignStore) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        program().compile("nonsense")
    with pytest.raises(TypeError):
        program().compile()
    assert not list(store.all())


def test_damage_is_a_miss(
    use: Use, open_builder: OpenBuilder, config: Config, compiled: list[Any], recorder: Recorder
) -> None:
    use(open_builder())
    whole = program().compile("cubin").code
    recorder.forgive = True
    cut: Callable[[bytes], bytes] = lambda data: data[:200]  # noqa: E731
    zeroed: Callable[[bytes], bytes] = lambda data: data[:-40] + b"\0" * 40  # noqa: E731
    for damage in (cut, zeroed):
        (file,) = [path for path in entries(config) if b'"foreign:cuda_core"' in path.read_bytes()]
        file.write_bytes(damage(file.read_bytes()))
        use(open_builder())
        assert program().compile("cubin").code == whole
    assert len(compiled) == 3
    assert len(recorder.named("damaged")) == 2


def entries(config: Config) -> list[Path]:
    """Return the files of the cache."""
    (place,) = config.cache_dirs
    return [path for path in place.rglob("*") if path.is_file()]


def test_the_caches_of_cuda_core_work_as_before(store: ForeignStore, compiled: list[Any]) -> None:
    with core.utils.InMemoryProgramCache() as theirs:
        codes = [program().compile("cubin", cache=theirs).code for _ in range(2)]
        assert len(theirs) == 1
        with pytest.raises(ValueError, match="name_expressions"):
            program(TEMPLATE).compile("cubin", name_expressions=("fill<int>",), cache=theirs)
    assert codes[0] == codes[1]
    assert len(compiled) == 1
    assert len(list(store.all("cuda_core"))) == 1  # A miss of theirs is looked up in ours.


# The seal


@pytest.fixture
def sealed(use: Use, open_builder: OpenBuilder, config: Config) -> Builder:
    """Return a sealed builder, which all programs use, on the cache of the test."""
    made = open_builder(replace(config, sealed=SealMode.ERROR))
    use(made)
    return made


def test_a_sealed_process_finds_what_is_stored(
    use: Use, open_builder: OpenBuilder, config: Config, compiled: list[Any]
) -> None:
    use(open_builder())
    code = program().compile("cubin").code
    use(open_builder(replace(config, sealed=SealMode.ERROR)))
    assert program().compile("cubin").code == code
    assert len(compiled) == 1


def test_a_sealed_miss_names_the_kernel_and_the_line(
    sealed: Builder, compiled: list[Any], recorder: Recorder
) -> None:
    made = program(SAXPY, name="blas")
    with pytest.raises(SealedError) as refused:
        made.compile("cubin")  # HERE
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "HERE" in text
    )
    assert str(refused.value) == (
        f"tests/adapters/cuda_core/test_programs.py:{line}: cuda_core saxpy of blas (sm_90) cannot be "
        "compiled in this sealed process: it is in no bundle and in no cache"
    )
    assert refused.value.hint
    assert not compiled
    assert recorder.named("sealed")[0]["mode"] == "error"
    assert sealed.sealed is SealMode.ERROR


def test_a_seal_that_warns_compiles(
    use: Use, open_builder: OpenBuilder, config: Config, compiled: list[Any], recorder: Recorder
) -> None:
    use(open_builder(replace(config, sealed=SealMode.WARN)))
    assert program().compile("cubin").code
    assert len(compiled) == 1
    assert [each["mode"] for each in recorder.named("sealed")] == ["warn"]


# What no key describes

NOT_KEYABLE = {
    "fdevice_time_trace": "it writes a time trace",
    "time": "it writes a table of times",
    "pch": "it uses a precompiled header",
    "use_pch": "it uses a precompiled header",
    "pch_dir": "it uses a precompiled header",
    "create_pch": "it writes a precompiled header",
}


def inputs_for(code: str = SAXPY, **more: Any) -> Any:
    from preheat.adapters.cuda_core.request import CompileRequest

    return CompileRequest(code, "c++", options(**more), "cubin")


@pytest.mark.parametrize("option", NOT_KEYABLE)
def test_options_that_no_key_describes(option: str) -> None:
    from preheat.adapters.base import NotKeyableError

    value: Any = True if option == "pch" else "somewhere"
    with pytest.raises(NotKeyableError, match=f"{option} is set: {NOT_KEYABLE[option]}"):
        _ = inputs_for(**{option: value}).identity


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("__global__ void k(const char **p) { *p = __TIME__; }", "it uses __TIME__"),
        ("#define H <a.h>\n#include H\n", "the program includes a file whose name is a macro"),
        ("#if __has_include(H)\n#endif\n", "the program tests for a file whose name is a macro"),
        ('#include "clock.h"\n', "clock.h uses __DATE__"),
        ('#include "macro.h"\n', "macro.h includes a file whose name is a macro"),
    ],
)
def test_texts_that_no_key_describes(code: str, why: str, here: Path) -> None:
    from preheat.adapters.base import NotKeyableError

    (here / "clock.h").write_text("static const char *made = __DATE__;")
    (here / "macro.h").write_text("#include MORE\n")
    with pytest.raises(NotKeyableError, match=why):
        _ = inputs_for(code).identity


def test_a_program_for_a_debugger_needs_a_name() -> None:
    from preheat.adapters.base import NotKeyableError

    with pytest.raises(NotKeyableError, match="a program for a debugger needs a name"):
        _ = inputs_for(debug=True).identity
    assert inputs_for(debug=True, name="mine.cu").identity


def test_what_no_key_describes_is_compiled_and_not_stored(
    store: ForeignStore, compiled: list[Any], recorder: Recorder, tmp_path: Path
) -> None:
    for _ in range(2):
        trace = str(tmp_path / "trace.json")
        assert program(fdevice_time_trace=trace).compile("cubin").code
    assert len(compiled) == 2
    assert not list(store.all())
    uncached = recorder.named("uncached")
    assert [each["program"] for each in uncached] == ["cuda_core saxpy"] * 2
    assert uncached[0]["reason"] == "fdevice_time_trace is set: it writes a time trace"


def test_a_sealed_process_refuses_what_no_key_describes(
    sealed: Builder, compiled: list[Any], tmp_path: Path
) -> None:
    made = program(fdevice_time_trace=str(tmp_path / "trace.json"))
    with pytest.raises(
        SealedError, match="fdevice_time_trace is set: it writes a time trace"
    ) as refused:
        made.compile("cubin")
    assert refused.value.caller.startswith("tests/adapters/cuda_core/test_programs.py:")
    assert not compiled
    assert sealed.sealed is SealMode.ERROR


def test_a_header_that_changes_during_the_compile_is_not_stored(
    builder: Builder, recorder: Recorder, here: Path
) -> None:
    from preheat.adapters.cuda_core.compile import (
        Compiled,
        compile_by_cuda_core,
        connect,
        obtain_code,
    )

    connect()
    header = here / "scale.h"
    header.write_text("#define SCALE 2.0f\n")

    def compile(log: Any) -> Any:
        header.write_text("#define SCALE 3.0f\n")
        return Compiled(compile_by_cuda_core(program(WITH_HEADER), "cubin", (), log))

    code = obtain_code(builder.foreign, inputs_for(WITH_HEADER), compile)
    assert code.code.startswith(b"\x7fELF")
    assert not list(builder.foreign.all())
    assert recorder.named("uncached")[0]["reason"] == "a header changed while it was compiled"


def test_the_adapter_changes_no_warning(store: ForeignStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program().compile("cubin")
    assert list(store.all())
