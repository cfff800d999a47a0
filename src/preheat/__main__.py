"""`python -m preheat` is `preheat`."""

from preheat.tools.cli import main

main()
