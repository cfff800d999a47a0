"""A ptxas that a program starts under the driver adds its input to its output."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from preheat.toolchain.binaries.ptx_section import attached_ptx, detach_ptx

pytestmark = [
    pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]

PTX = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\n"
#: The smallest file that has sections: a header, and the row that every table begins with.
CUBIN = (
    b"\x7fELF\x02\x01\x01".ljust(40, b"\0")
    + b"\x40".ljust(18, b"\0")
    + b"\x40\0\x01\0\0\0".ljust(70, b"\0")
)
#: It writes the cubin where OUTPUT says, as ptxas writes its result, and ends with STATUS.
ASSEMBLER = """
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    FILE* file = fopen(getenv("OUTPUT"), "w");
    fwrite(code, 1, sizeof code, file);
    fclose(file);
    return atoi(getenv("STATUS"));
}
"""


@pytest.fixture(scope="module")
def assembler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a program that is called ptxas, and makes the same cubin of every input."""
    program = tmp_path_factory.mktemp("bin") / "ptxas"
    code = f"static const unsigned char code[] = {{{','.join(map(str, CUBIN))}}};"
    subprocess.run(["cc", "-x", "c", "-", "-o", program], input=(code + ASSEMBLER).encode(), check=True)
    return program


def assemble(
    program: Path,
    place: Path,
    words: Sequence[str],
    output: str,
    *,
    status: int = 0,
    driver: bool = True,
) -> bytes:
    """Run the program in a directory that has `k.ptx` and other files, and return its output."""
    (place / "k.ptx").write_bytes(PTX)
    (place / "sm_90").write_text("a file with the name of an architecture")
    env = {**os.environ, "OUTPUT": output, "STATUS": str(status)}
    env = driver_environment(env) if driver else env
    done = subprocess.run([program, *words], cwd=place, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
    return (place / output).read_bytes()


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["-v", "--gpu-name=sm_90a", "k.ptx", "-o", "k.cubin"], "k.cubin"),
        (["-arch", "sm_90", "-o", "k.cubin", "k.ptx"], "k.cubin"),
        (["--output-file", "k.cubin", "k.ptx"], "k.cubin"),
        (["k.ptx", "--output-file=k.cubin"], "k.cubin"),
        (["k.ptx"], "elf.o"),
    ],
)
def test_the_output_has_the_input_in_a_section(
    assembler: Path, tmp_path: Path, words: list[str], output: str
) -> None:
    made = assemble(assembler, tmp_path, words, output)
    assert attached_ptx(made) == [PTX]
    assert detach_ptx(made) == CUBIN


def test_a_failed_ptxas_changes_nothing(assembler: Path, tmp_path: Path) -> None:
    assert assemble(assembler, tmp_path, ["k.ptx", "-o", "k"], "k", status=255) == CUBIN


def test_a_ptxas_without_input_changes_nothing(assembler: Path, tmp_path: Path) -> None:
    assert assemble(assembler, tmp_path, ["--version"], "elf.o") == CUBIN


def test_other_programs_and_other_environments_change_nothing(assembler: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copy(assembler, other)
    assert assemble(other, tmp_path, ["k.ptx", "-o", "k"], "k") == CUBIN
    assert assemble(assembler, tmp_path, ["k.ptx", "-o", "k"], "k", driver=False) == CUBIN
