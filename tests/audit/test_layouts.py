"""The declarations of CUPTI in the audit library are those of its headers, where there are headers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat.audit.library import LIBRARY
from tests.audit.conftest import COMPILER

NATIVE = LIBRARY.with_name("native")

#: Our structure and field, and those of CUPTI.
FIELDS = [
    ("CallbackData.site", "CUpti_CallbackData.callbackSite"),
    ("CallbackData.function", "CUpti_CallbackData.functionName"),
    ("CallbackData.parameters", "CUpti_CallbackData.functionParams"),
    ("CallbackData.result", "CUpti_CallbackData.functionReturnValue"),
    ("ResourceData.descriptor", "CUpti_ResourceData.resourceDescriptor"),
    ("ModuleData.id", "CUpti_ModuleResourceData.moduleId"),
    ("ModuleData.bytes", "CUpti_ModuleResourceData.cubinSize"),
    ("LoadParameters.image", "cuModuleLoad_params.fname"),
    ("LoadParameters.image", "cuModuleLoadData_params.image"),
    ("LoadParameters.image", "cuModuleLoadDataEx_params.image"),
    ("LoadParameters.image", "cuModuleLoadFatBinary_params.fatCubin"),
    ("LoadParameters.image", "cuLibraryLoadData_params.code"),
    ("LoadParameters.image", "cuLibraryLoadFromFile_params.fileName"),
    ("LinkDataParameters.type", "cuLinkAddData_v2_params.type"),
    ("LinkDataParameters.data", "cuLinkAddData_v2_params.data"),
    ("LinkDataParameters.size", "cuLinkAddData_v2_params.size"),
    ("LinkFileParameters.path", "cuLinkAddFile_v2_params.path"),
]
_CALL = "CUPTI_DRIVER_TRACE_CBID_"
NUMBERS = [
    ("ID_MODULE_LOAD", f"{_CALL}cuModuleLoad"),
    ("ID_MODULE_LOAD_DATA", f"{_CALL}cuModuleLoadData"),
    ("ID_MODULE_LOAD_DATA_EX", f"{_CALL}cuModuleLoadDataEx"),
    ("ID_MODULE_LOAD_FAT", f"{_CALL}cuModuleLoadFatBinary"),
    ("ID_LINK_COMPLETE", f"{_CALL}cuLinkComplete"),
    ("ID_LINK_ADD_DATA", f"{_CALL}cuLinkAddData_v2"),
    ("ID_LINK_ADD_FILE", f"{_CALL}cuLinkAddFile_v2"),
    ("ID_LIBRARY_LOAD_DATA", f"{_CALL}cuLibraryLoadData"),
    ("ID_LIBRARY_LOAD_FILE", f"{_CALL}cuLibraryLoadFromFile"),
    ("DOMAIN_DRIVER", "CUPTI_CB_DOMAIN_DRIVER_API"),
    ("DOMAIN_RESOURCE", "CUPTI_CB_DOMAIN_RESOURCE"),
    ("MODULE_LOADED", "CUPTI_CBID_RESOURCE_MODULE_LOADED"),
    ("API_ENTER", "CUPTI_API_ENTER"),
    ("API_EXIT", "CUPTI_API_EXIT"),
    ("ALREADY_SUBSCRIBED", "CUPTI_ERROR_MAX_LIMIT_REACHED"),
    ("SUBSCRIBED_ELSEWHERE", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"),
]


def _headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes += map(str, sorted(Path("/usr/local").glob("cuda-*")))
    homes += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    for home in filter(None, homes):
        for place in ("include", "extras/CUPTI/include"):
            if (Path(home) / place / "cupti.h").is_file():
                return Path(home) / place
    return None


HEADERS = _headers()


def _checks() -> Iterator[str]:
    yield f'#include <cupti.h>\n#include "{NATIVE}/cupti.c"\n'
    for mine, theirs in FIELDS:
        (a, b), (c, d) = mine.split("."), theirs.split(".")
        yield f'_Static_assert(offsetof({a}, {b}) == offsetof({c}, {d}), "{mine}");\n'
    for mine, theirs in NUMBERS:
        yield f'_Static_assert((int){mine} == (int){theirs}, "{mine}");\n'


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
@pytest.mark.skipif(HEADERS is None, reason="the headers of CUPTI are not installed")
def test_the_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    assert COMPILER is not None
    source = tmp_path / "check.c"
    source.write_text("".join(_checks()))
    done = subprocess.run(
        [COMPILER, "-fsyntax-only", f"-I{HEADERS}", f"-I{NATIVE}", str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
