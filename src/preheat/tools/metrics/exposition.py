"""Metrics as text in the exposition format of Prometheus, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from preheat.tools.metrics.metrics import Family, Sample

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Family]) -> str:
    """Return the text of `families`. A family without samples is announced and has no value."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}"
    yield f"# TYPE {family.name} {family.type}"
    for sample in family.samples:
        yield f"{family.name}{_labels(sample)} {_number(sample.value)}"


def _labels(sample: Sample) -> str:
    quoted = (f'{name}="{_escaped(value, quote=True)}"' for name, value in sample.labels)
    return f"{{{','.join(quoted)}}}" if sample.labels else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    """Escape what would end a line or a quoted value. Bytes that are no text become `?`."""
    text = text.encode(errors="replace").decode()
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
