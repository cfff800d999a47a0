#!/bin/sh
# Run this before `docker build`, and again when the kernels change. Commit what it writes:
# kernels.toml lists the kernels that the server asked for, and the image is baked from it.
set -e

# Let the server run through everything it does. Only kernels that it asks for are recorded. The
# emulator needs no GPU, and the architecture of the recording does not matter for the bake.
PREHEAT_DEVICE=${PREHEAT_DEVICE:-emulator} preheat record -o kernels.toml -- python server.py 64

# Now build the image, on a machine without a GPU:
#   docker build -t server .
#   docker run --rm --gpus all --read-only server
#   docker run --rm -e PREHEAT_DEVICE=emulator server
