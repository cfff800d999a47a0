"""Compile a template for two architectures, and say where each came from.

Run it twice: the second time nothing is compiled.
"""

from __future__ import annotations

import preheat

SOURCE = """
template <class T>
__global__ void scale(T* x, T factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
"""


def main() -> None:
    builder = preheat.default_builder()
    for arch in ("sm_90", "sm_100"):
        artifact = preheat.compile(
            SOURCE, arch, label="scale.cu", names=["scale<float>", "scale<double>"]
        )
        for name in artifact.names:
            print(f"{arch}: {artifact.entry(name)}")
    stats = builder.stats()["process"]
    print(f"{stats.get('compiles', 0):.0f} compiled, {stats.get('hits.disk', 0):.0f} found on disk")


if __name__ == "__main__":
    main()
