"""A device that runs PTX on the CPU: every thread of a grid, as NumPy arrays.

device       the seam: memory, streams, modules
module       loaded PTX: variables in memory, kernels
launch       one launch: parameters, waves of thread blocks
wave         which threads run next; barriers are in `barrier`
group        threads that run together, and their registers
access       loads and stores of many threads; which memory there is, in `memory`
image        PTX made ready once: `decode`, `flow`, `generate`, `writer`, `emit`
table        the instructions that only compute
"""
