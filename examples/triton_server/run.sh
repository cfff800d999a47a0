#!/bin/sh
# A Triton server that starts without compiling. Run it where Triton, torch and a GPU are.
set -e

# 1. Record a run. The server is not changed: preheat notes the kernels that Triton compiles.
preheat record -o kernels.toml -- python serve.py 4096 1000

# 2. Bake on any machine. It needs no GPU, and --arch may be repeated. A size that is odd, or 1, is
#    another variant for Triton. With --coverage weak, the bundle also has variants that assume less
#    about the sizes. They serve requests that nobody recorded.
preheat bake kernels.toml --arch sm_90 --coverage weak -o kernels.heat

# 3. Check that the bundle has everything that the manifest lists.
preheat check kernels.toml --arch sm_90 --coverage weak --bundle kernels.heat

# 4. Start sealed: nothing is compiled, also for sizes that were not recorded.
preheat run --bundle kernels.heat --sealed -- python serve.py 4096 1000 1 33 8191
