"""Emit the instructions that access memory and compute addresses."""

from __future__ import annotations

import numpy as np

from preheat.emulator import atomics, cluster
from preheat.emulator.addresses import LOCAL_WINDOW, SHARED_WINDOW
from preheat.emulator.decode import Address, Op, Operand, Symbol, Vector
from preheat.emulator.variant import TYPES
from preheat.emulator.writer import BOOL, I64, U32, U64, DType, Writer

__all__ = [
    "atomic",
    "convert_address",
    "is_space",
    "load",
    "map_address",
    "rank_of_address",
    "store",
]

_SPACES = ("global", "shared", "local", "const", "param")
_ORDER = frozenset("weak relaxed acquire release acq_rel sc volatile mmio cta cluster gpu sys".split())
_CACHE = frozenset("ca cg cs lu cv wb wt nc unified".split())


def _space(word: str) -> str:
    """Return the space that a modifier names. "cluster" is the shared memory of a cluster."""
    return "cluster" if word == "shared::cluster" else word.partition("::")[0]


def _memory_modifiers(w: Writer, op: Op) -> tuple[str, int, DType]:
    """Return space, number of elements and type of a load or store. Ignore ordering and caching."""
    space = "generic"
    count = 1
    dtype = None
    for word in op.modifiers:
        if word.partition("::")[0] in _SPACES:
            space = _space(word)
        elif word in ("v2", "v4", "v8"):
            count = int(word[1:])
        elif word in TYPES and word != "pred":
            dtype = TYPES[word]
        elif word not in _ORDER and word not in _CACHE and not word.startswith(("L1::", "L2::")):
            raise w.unsupported()
    if dtype is None:
        raise w.unsupported()
    return space, count, dtype


def load(w: Writer, op: Op) -> None:
    """Emit `ld` or `ldu`."""
    space, count, dtype = _memory_modifiers(w, op)
    target, source = op.operands[:2]
    items = target.items if isinstance(target, Vector) else (target,)
    if len(items) != count:
        raise w.unsupported()
    kind = w.result_type(items[0], dtype)
    if (parameter := _parameter(w, source, space)) is not None:
        for i, item in enumerate(items):
            at = parameter + i * kind.itemsize
            call = f"W.parameter({at}, {w.constant(kind)})"
            if not 0 <= at <= w.generator.parameter_bytes - kind.itemsize:
                call = (
                    f"W.no_parameter({at}, {kind.itemsize}, {w.generator.parameter_bytes}, {w.site()})"
                )
            w.write(item, w.assign(call), kind)
        return
    addresses, offset = w.address(source, space)
    where = f"{addresses}, {offset}, {w.constant(kind)}, {w.site()}"
    call = f"load(G, {where})" if count == 1 else f"load_vector(G, {where}, {count})"
    w.write_results(items, (kind,) * count, call)


def _parameter(w: Writer, source: Operand | None, space: str) -> int | None:
    """Return the offset of a kernel parameter that is accessed by name, or None."""
    base = source.base if space == "param" and isinstance(source, Address) else None
    if isinstance(base, Symbol) and base.name in w.generator.parameters:
        return w.generator.parameters[base.name] + base.offset
    return None


def store(w: Writer, op: Op) -> None:
    """Emit `st`."""
    space, count, dtype = _memory_modifiers(w, op)
    target, source = op.operands[:2]
    items = source.items if isinstance(source, Vector) else (source,)
    if len(items) != count:
        raise w.unsupported()
    if dtype.kind == "u":
        _, dtype = w.read_bits(items[0], dtype.itemsize)
    values = ", ".join(w.read(item, dtype) for item in items)
    addresses, offset = w.address(target, space)
    verb = "store" if count == 1 else "store_vector"
    w.lines.append(f"{verb}(G, {addresses}, {offset}, {w.constant(dtype)}, {w.site()}, {values})")


def atomic(w: Writer, op: Op) -> None:
    """Emit `atom` or `red`."""
    space = "generic"
    verb = kind = ""
    count = 0
    for word in op.modifiers:
        if word.partition("::")[0] in _SPACES:
            space = _space(word)
        elif word in atomics.OPERATIONS:
            verb = word
        elif word in TYPES:
            kind = word
        elif word in ("v2", "v4", "v8"):
            count = int(word[1:])
        elif word not in _ORDER and word != "noftz" and not word.startswith("L2::"):
            raise w.unsupported()
    update = atomics.find_update(verb, kind)
    operands = op.operands if op.mnemonic == "atom" else (None, *op.operands)
    if update is None or len(operands) != 3 + (verb == "cas"):
        raise w.unsupported()
    dtype = TYPES[kind]
    addresses, offset = w.address(operands[1], space)
    results = _elements(w, operands[0], count)
    columns = [_elements(w, operand, count) for operand in operands[2:]]
    rows = [[w.read(item, dtype) for item in row] for row in zip(*columns, strict=True)]
    for i, (result, row) in enumerate(zip(results, rows, strict=True)):
        returns_old = result is not None and w.is_read_later(result)
        where = f"{addresses}, {offset + i * dtype.itemsize}, {w.constant(dtype)}, {w.site()}"
        call = f"atomic(G, {where}, {w.constant(update)}, {returns_old}, {', '.join(row)})"
        if returns_old:
            w.write(result, w.assign(call), dtype)
        else:
            w.lines.append(call)


def _elements(w: Writer, operand: Operand | None, count: int) -> tuple[Operand | None, ...]:
    """Return the `count` elements of a vector, or the operand itself if `count` is 0."""
    if operand is None or count == 0:
        return (operand,) * max(count, 1)
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise w.unsupported()
    return operand.items


def convert_address(w: Writer, op: Op) -> None:
    """Emit `cvta`, which converts between the addresses of a space and generic ones."""
    *words, kind = op.modifiers or ("",)
    space = words[-1].partition("::")[0] if words else ""
    if space not in _SPACES or kind != "u64":
        raise w.unsupported()
    if space == "param" and not w.generator.is_entry:
        space = "local"
    target, source = op.operands
    if space in ("shared", "local"):
        window = np.uint64(SHARED_WINDOW if space == "shared" else LOCAL_WINDOW)
        sign = "-" if words[0] == "to" else "+"
        w.write(target, w.assign(f"{w.read(source, U64)} {sign} {w.constant(window)}"), U64)
    else:
        name, held_type = w.read_bits(source, 8)
        w.write(target, w.assign(name), held_type)


def is_space(w: Writer, op: Op) -> None:
    """Emit `isspacep`."""
    space = _space(op.modifiers[0]) if op.modifiers else ""
    if space not in ("global", "shared", "cluster", "local", "const"):
        raise w.unsupported()
    call = f"in_space(G, {w.read(op.operands[1], I64)}, {space!r})"
    w.write(op.operands[0], w.assign(call), BOOL)


def map_address(w: Writer, op: Op) -> None:
    """Emit `mapa`, which maps an address to another block of the cluster."""
    generic, dtype = _cluster_modifiers(w, op)
    address = w.read(op.operands[1], dtype)
    rank = w.read(op.operands[2], U32)
    call = f"{w.constant(cluster.mapped)}({address}, {rank})"
    if generic:
        call = f"{w.constant(cluster.mapped_generic)}(G, {address}, {rank}, {w.site()})"
    w.write(op.operands[0], w.assign(call), dtype)


def rank_of_address(w: Writer, op: Op) -> None:
    """Emit `getctarank`, which returns the block of the cluster that an address belongs to."""
    generic, dtype = _cluster_modifiers(w, op)
    address = w.read(op.operands[1], dtype)
    call = f"{w.constant(cluster.rank_of)}(G, {address})"
    if generic:
        call = f"{w.constant(cluster.rank_of_generic)}(G, {address}, {w.site()})"
    w.write(op.operands[0], w.assign(call), U32)


def _cluster_modifiers(w: Writer, op: Op) -> tuple[bool, DType]:
    """Return whether addresses are generic, and their type."""
    *space, kind = op.modifiers or ("",)
    if space not in ([], ["shared::cluster"]) or kind not in ("u32", "u64")[not space :]:
        raise w.unsupported()
    return not space, TYPES[kind]
