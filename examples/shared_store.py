"""Two machines and one store: the second machine compiles nothing.

    python shared_store.py

Each machine is a process with its own cache. The store is a directory here. On a network it is
a URL such as s3://bucket/kernels or redis://host:6379/0, with keys that say whom to trust.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

#: The program of each machine. It does not mention the store: an environment variable names it.
MACHINE = """
import preheat

SOURCE = 'extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }'
artifact = preheat.compile(SOURCE, "sm_90", label="scale.cu")
counted = preheat.default_builder().stats()["process"]
compiles, found = (int(counted.get(name, 0)) for name in ("compiles", "hits.remote"))
print(f"{len(artifact.cubin)} bytes of machine code: {compiles} compiled, {found} from the store")
"""


def run_machine(name: str, place: Path) -> str:
    """Run a process with its own empty cache, and return what it prints."""
    env = {
        **os.environ,
        "PREHEAT_CACHE_DIR": str(place / name),
        "PREHEAT_REMOTE": f"file://{place / 'store'}",
    }
    command = [sys.executable, "-c", MACHINE]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


with tempfile.TemporaryDirectory() as folder:
    place = Path(folder).resolve()
    # Only this user can write to the directory, so no keys are needed. Without keys, preheat
    # refuses a store that others can write to: `preheat keys new` makes a pair of keys.
    (place / "store").mkdir(mode=0o700)
    print("machine A:", run_machine("a", place))
    print("machine B:", run_machine("b", place))
    # Machine A runs again: its own disk has the code now, so it does not ask the store.
    print("machine A:", run_machine("a", place))
