"""What a command compiles and loads: a library inside its processes, and a reader of what it reports.

library.py     the audit library, and the environment in which a command is audited
native/        its sources in C
in_process.py  its Python side, in every Python of the command
events.py      the events that the processes have written
sites.py       Python frames: the line of the program, and the library that it called
processes.py   the programs that were started, and the compilers among them
fatbin.py      the entries of fat binaries
images.py      the kind and the digest of each module
origins.py     where a module came from: a bundle, the store, an installed file
library_caches.py  modules in the caches of other libraries
session.py     one audited run, from the environment to the report
report.py      all of it as one value
unrecorded.py  what a recorded run compiled without a recording
verdict.py     what an operator keeps of a sealed run
"""
