"""`python -m preheat.tools.cli` is `preheat`."""

from preheat.tools.cli import main

main()
