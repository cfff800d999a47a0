"""Options that a worker adds to every compile are part of the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preheat.model.key import SCHEMA
from preheat.toolchain import nvjitlink, nvrtc, signature, worker

# No key names these words: an entry made with other words would be found under the same key. So when
# one changes and gives other code, raise `SCHEMA` in key.py and write the new words here.
WORDS = {
    2: {
        "cuda": (
            ["--gpu-architecture=sm_90", "-Xptxas=-v", "--no-cache", "--frandom-seed=preheat"],
            ["-I@0", "-I@cuda", "--fdevice-time-trace=trace", "--the-program's-own"],
            "/preheat/k.cu",
            # Before `__preheat_kernel` the code was the same, and only types of some kernels were lost.
            "\n\ntemplate<class T> __device__ char __preheat_sig;\n"
            "template<class... A> struct __preheat_function { typedef void type(A...); };\n"
            "template<class... A> __device__ __preheat_function<A...> "
            "__preheat_kernel(void (*)(A...));\n",
        ),
        "ptx": ["-arch=sm_90", "-Xptxas=-v", "-no-cache", "--the-program's-own"],
    }
}


def test_other_options_for_a_compiler_need_another_schema(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reported: dict[str, list[Any]] = {}

    def compile_program(_source: bytes, name: str, options: list[str], **_: Any) -> nvrtc.Compiled:
        reported["cuda"] = [options, name]
        return nvrtc.Compiled("NVRTC_ERROR_COMPILATION", "", b"", b"")

    def assemble(_source: bytes, _name: str, options: list[str]) -> nvjitlink.Assembled:
        reported["ptx"] = options
        return nvjitlink.Assembled("ERROR_PTX_COMPILE", "", b"")

    monkeypatch.chdir(tmp_path)  # a worker leaves it
    monkeypatch.setattr(nvrtc, "load", lambda _: None)
    monkeypatch.setattr(nvrtc, "compile_program", compile_program)
    monkeypatch.setattr(nvjitlink, "assemble", assemble)
    monkeypatch.setattr(worker, "_build", lambda name: name)
    message = {"arch": "sm_90", "options": ["--the-program's-own"], "names": [], "trace": True}
    roots = {"0": str(tmp_path), "cuda": str(tmp_path)}
    worker._cuda({**message, "label": "k.cu", "library": "", "roots": roots}, {"source": b""})
    worker._ptx({**message, "label": "k.ptx"}, {"source": b""})
    (options, name) = reported["cuda"]
    mine = {"cuda": (options[:4], options[4:], name, signature.PROBE), "ptx": reported["ptx"]}
    assert mine == WORDS.get(SCHEMA)
