"""`python -m preheat` is `preheat`."""

from preheat.cli import main

main()
