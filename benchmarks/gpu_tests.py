"""Record which tests have run on a GPU: python benchmarks/gpu_tests.py JUNIT.xml [--json FILE]

`make test-gpu` runs it on the report that pytest has written. The table has a row for each file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from common import options, report

OUTCOMES = ("passed", "failed", "skipped")


def outcomes(results: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the outcome of each test in a JUnit report."""
    for case in ElementTree.parse(results).iter("testcase"):
        found = {child.tag for child in case}
        outcome = (
            "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        )
        yield case.get("classname", "").partition(".Test")[0], outcome


def main() -> None:
    """Write the counts of each file, with the machine and the commit."""
    parser = options(__doc__)
    parser.add_argument("results", type=Path, help="the JUnit report of pytest")
    args = parser.parse_args()
    counts = Counter(outcomes(args.results))
    modules = sorted({module for module, _ in counts})
    rows = [(module, *(counts[module, outcome] for outcome in OUTCOMES)) for module in modules]
    report("gpu_tests", "Tests on a GPU", ("", *OUTCOMES), rows, into=args.json)


if __name__ == "__main__":
    main()
