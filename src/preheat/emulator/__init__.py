"""A device that runs PTX on the CPU: the threads of a grid are elements of NumPy arrays.

device       the device interface: memory, streams, modules
module       loaded PTX: variables in memory, kernels
launch       one launch: parameters, waves of thread blocks
wave         scheduling of threads; barriers are in `barrier`
group        threads that run together, and their registers
access       loads and stores of many threads, at `addresses`; valid memory is in `memory`
image        PTX compiled to Python: `decode`, `control_flow`, `generate`, `writer`, `emit`
table        the instructions that only compute: `variant`, `builders`
"""
