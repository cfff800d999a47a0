"""The CUDA driver on the CPU: libcuda.so.1 with the documented driver API, over the emulator.

bootstrap     puts the functions below into the shim, `native/`, when a program first calls it
calls         the table of all functions, those that are implemented, and exceptions as statuses
driver        the state of the process: devices, handles, the memory of programs
devices       devices and their attributes; `contexts`: contexts of threads
memory        allocations; `allocations` has them by address; `pools`, `pointers`, `managed`
copies        copies and fills; `arrays`: CUDA arrays; `textures`: textures and surfaces
streams       streams and functions of the host; `events`
modules       modules, libraries and kernels; `functions`: their attributes; `launches`, `configs`
linking       the linker of the driver
graphs/       captures, graphs and executables
images        what a program loads, as PTX; compilers put it into their results: `native/compilers.c`
library       the shared library, and the environment in which programs load it
"""
