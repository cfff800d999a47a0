"""`python -m preheat.cli` is `preheat`."""

from preheat.cli import main

main()
