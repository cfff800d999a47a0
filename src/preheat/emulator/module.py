"""Loaded PTX: variables in memory, and kernels that can be launched."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Any, TypeVar

import numpy as np

from preheat.devices import base
from preheat.emulator.access import ArgumentSpec
from preheat.emulator.decode import Immediate
from preheat.emulator.errors import invalid_ptx
from preheat.emulator.image import ADDRESS, Image, Kernel, image
from preheat.emulator.launch import Launch, LaunchDevice
from preheat.emulator.memory import Buffer, Memory, align_up
from preheat.emulator.variant import TYPES
from preheat.emulator.wave import Program
from preheat.errors import (
    EmulatorFault,
    InvalidCodeError,
    LaunchError,
    SourceLine,
    UnsupportedInstructionError,
)
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, EntryPoint
from preheat.model.key import Part
from preheat.model.lines import Lines
from preheat.process.lazy import lazy

__all__ = ["EmulatorFunction", "EmulatorModule", "load"]

Fault = TypeVar("Fault", bound=EmulatorFault)

_NO_LINES = 'compile with options=["-lineinfo"] to see the line of the CUDA source'
_GAP = 16  # Bytes between variables, so that an access out of bounds is detected.


def load(
    artifact: Artifact,
    memory: Memory,
    device: LaunchDevice,
    lines: base.FindLines | None,
    *,
    sanitize: bool,
) -> EmulatorModule:
    """Load an artifact's PTX into the memory of a device, or raise `InvalidCodeError`."""
    try:
        loaded = image(artifact.ptx.decode(), sanitize=sanitize)
        with device.lock:
            return EmulatorModule(loaded, artifact, memory, device, lines)
    except UnicodeDecodeError as bad:
        raise invalid_ptx(f"not a text: {bad}") from None
    except ptx.SyntaxFault as bad:
        raise invalid_ptx(f"{bad}, line {bad.line}") from None


class EmulatorModule:
    """PTX with its variables in memory. A launch holds the `lock` of its device."""

    def __init__(
        self,
        image: Image,
        artifact: Artifact,
        memory: Memory,
        device: LaunchDevice,
        find_lines: base.FindLines | None = None,
    ) -> None:
        self.image = image
        self.artifact = artifact
        self.memory = memory
        self.device = device
        self.heap = device.heap
        self.textures = device.textures
        self._find_lines = find_lines
        self._symbols: dict[str, base.Symbol] = {}
        self._buffers: list[Buffer] = []
        variables = [v for v in image.module.variables.values() if v.space in ("global", "const")]
        defined = [v for v in variables if ".extern" not in v.linkage and v.kind not in ptx.OPAQUE]
        self._arena = self._allocate_variables(defined)
        self.constants = tuple(self._symbols[v.name] for v in defined if v.space == "const")
        self.addresses = {name: symbol.address for name, symbol in self._symbols.items()}
        self.addresses |= image.handles
        try:
            for variable in defined:
                self._initialise(variable)
        except InvalidCodeError:
            self.unload()
            raise

    def _allocate_variables(self, variables: list[ptx.Variable]) -> np.ndarray[Any, Any]:
        """Allocate memory for all variables, and return the address of each."""
        offsets = []
        top = 0
        for variable in variables:
            step = max(variable.align, _GAP)
            top = align_up(top, step)
            offsets.append(top)
            top += variable.size + _GAP
        widest = max((v.align for v in variables), default=1)
        arena = np.zeros(top + widest, np.uint8)
        start = align_up(arena.ctypes.data, widest)
        for variable, offset in zip(variables, offsets, strict=True):
            self._symbols[variable.name] = base.Symbol(start + offset, variable.size)
            writable = variable.space != "const"
            self._buffers.append(self.memory.add(start + offset, variable.size, writable=writable))
        return arena

    def _initialise(self, variable: ptx.Variable) -> None:
        values = b"".join(self._value(item, variable) for item in variable.initial)
        if len(values) > variable.size:
            raise invalid_ptx(f"{variable.name} has more values than elements, line {variable.line}")
        ctypes.memmove(self._symbols[variable.name].address, values, len(values))

    def _value(self, item: str, variable: ptx.Variable) -> bytes:
        """Return the bytes of one element: a number, or an address and its mask."""
        size = ptx.SIZES[variable.kind]
        if (named := ADDRESS.fullmatch(item)) is None:
            try:
                return bytes(Immediate(item).value(TYPES[variable.kind]).tobytes())
            except (KeyError, ValueError):
                message = f"{variable.name} cannot hold {item!r}, line {variable.line}"
                raise invalid_ptx(message) from None
        mask, name, offset = named.groups()
        if name not in self.addresses:
            raise invalid_ptx(f"{variable.name} points to {name}, not defined, line {variable.line}")
        address = self.addresses[name] + int(offset or "0", 0)
        if mask:
            chosen = int(mask, 16)
            address = (address & chosen) >> (chosen & -chosen).bit_length() - 1
        return (address & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def function(self, name: str) -> EmulatorFunction:
        """Return the kernel with this entry name."""
        if name not in self.image.module.entries:
            raise invalid_ptx(f"there is no kernel {name!r}")
        try:
            kernel = self.image.kernel(name)
        except ptx.SyntaxFault as bad:
            raise invalid_ptx(f"{bad}, line {bad.line}") from None
        except UnsupportedInstructionError as error:
            raise self.locate(error) from None
        self._check_symbols(kernel)
        return EmulatorFunction(self, name, kernel)

    @lazy
    def _lines(self) -> Lines | None:
        """The source lines of the code. The first fault reads them."""
        return None if self._find_lines is None else self._find_lines()

    def locate(
        self,
        fault: Fault,
        calls: Iterable[tuple[str, int]] = (),
        other: tuple[str, int] | None = None,
    ) -> Fault:
        """Return the same fault with the lines of the CUDA source.

        `calls` are the function and PTX line of the fault, then of every call around it; those of an
        unsupported instruction are in the error itself. `other` are the function and PTX line that the
        message ends with.
        """
        stack = list(calls) or [(fault.kernel, fault.line or 0)]
        lines = self._lines
        bodies = self.image.bodies
        found = [] if lines is None else [lines.of(bodies[name], line) for name, line in stack]
        if found and found[0]:
            message = fault.message
            if other is not None and lines is not None:
                message = _with_source(message, lines.of(bodies[other[0]], other[1]))
            return fault.located(tuple(chain.from_iterable(found)), message=message)
        from_cuda = Part("language", "cuda") in self.artifact.parts
        return fault.located((), hint=_NO_LINES if from_cuda else "")

    def _check_symbols(self, kernel: Kernel) -> None:
        for code in kernel.functions.values():
            known = {*code.local_offsets, *code.parameters, *self.addresses, *kernel.shared}
            for _, symbol in code.symbol_slots:
                if symbol not in known and f"{code.name}.{symbol}" not in kernel.shared:
                    raise invalid_ptx(f"{code.name} uses {symbol}, not defined")

    def symbol(self, name: str) -> base.Symbol | None:
        """Return the variable with this name, or None."""
        return self._symbols.get(name)

    def unload(self) -> None:
        """Free the variables."""
        self.device.captures.reject("unload", watched=True)
        with self.device.lock:
            for buffer in self._buffers:
                self.memory.free(buffer)
            self._buffers.clear()


class EmulatorFunction:
    """A kernel that can be launched."""

    def __init__(self, module: EmulatorModule, name: str, kernel: Kernel) -> None:
        self.name = name
        self._device = module.device
        entry = next((e for e in module.artifact.entries if e.name == name), None)
        self.title = entry.title if entry else name
        head = module.image.module.entries[name]
        self.program = Program(
            kernel=name,
            arguments=_arguments(head.params, entry),
            functions=kernel.functions,
            missing=kernel.missing,
            shared=kernel.shared,
            shared_bytes=kernel.shared_bytes,
            addresses=module.addresses,
            constants=module.constants,
            memory=module.memory,
            heap=module.heap,
            textures=module.textures,
            reserved=kernel.reserved,
            patience=module.device.patience,
            limits=module.device.limits,
            sanitize=module.image.sanitize,
            locate=module.locate,
        )
        self.parameters = head.params
        used = entry.resources if entry else None
        shared = used.shared if used else kernel.shared_bytes - kernel.reserved
        self._carveout = -1
        self.attributes = base.Attributes(
            registers=used.registers if used else 0,
            shared=shared,
            local=used.stack if used else max(c.frame_bytes for c in kernel.functions.values()),
            constant=sum(symbol.size for symbol in module.constants),
            threads=_most_threads(head.directives),
            binary_version=_number(module.artifact.arch),
            ptx_version=_target_number(module.image.module.target[0]),
            dynamic_shared=module.device.limits.shared_optin - shared,
            cluster=_fixed_cluster(head.directives),
        )
        threads, cluster = self.attributes.threads, self.attributes.cluster
        self.bounds = base.Bounds(threads, shared, cluster)
        self._directives = head.directives

    def prepare(self, geometry: base.Geometry, stream: base.Stream, *, shared_unit: int = 1) -> Launch:
        """Return a prepared launch. Dynamic shared memory is allocated in units of some bytes."""
        if geometry.cluster is None and self.attributes.cluster is not None:
            geometry = geometry._replace(cluster=self.attributes.cluster)
        self._check_cluster(math.prod(geometry.cluster or (1, 1, 1)))
        return Launch(
            self.program,
            self.parameters,
            geometry,
            self._device,
            self.title,
            stream.handle,
            shared_unit,
        )

    def _check_cluster(self, blocks: int) -> None:
        if _numbers(self._directives, ".blocksareclusters") is not None:
            why = "the emulator does not support __block_size__ with a cluster (.blocksareclusters)"
            raise LaunchError(self.title, why, hint="use __cluster_dims__, and a grid of blocks")
        limit = _numbers(self._directives, ".maxclusterrank")
        if limit and blocks > limit[0]:
            why = f"a cluster of {blocks} blocks; the most of {self.title} is {limit[0]}"
            raise LaunchError(self.title, why, hint="__launch_bounds__ sets it as its third number")

    def occupancy(self, threads: int, shared: int = 0) -> base.Occupancy:
        """Return how many blocks fit the threads, registers and shared memory of a multiprocessor."""
        whole = align_up(max(threads, 1), 32)
        has = self._device.multiprocessor
        each = self.attributes.shared + shared + has.reserved
        blocks = min(
            has.blocks,
            has.threads // whole,
            has.registers // (max(self.attributes.registers, 1) * whole),
            has.shared // max(each, 1),
        )
        return base.Occupancy(blocks, blocks * whole / has.threads)

    def carveout(self) -> int:
        """Return the carveout that was set."""
        return self._carveout

    def set_carveout(self, percent: int) -> None:
        """Store the number. The emulator has no cache to divide."""
        self._carveout = percent


#: The names that compilers give to parameters: the kernel's name, and a number.
_NUMBERED = re.compile(r".*_param_\d+")


def _arguments(parameters: tuple[ptx.Param, ...], entry: EntryPoint | None) -> tuple[ArgumentSpec, ...]:
    """Return the parameters of a kernel with their C++ types, or with their names in PTX."""
    types = [each.type for each in entry.parameters] if entry else []
    return tuple(
        ArgumentSpec(each.offset, each.size, known or _NUMBERED.sub("", each.name))
        for each, known in zip_longest(parameters, types[: len(parameters)])
    )


def _with_source(message: str, places: tuple[SourceLine, ...]) -> str:
    """Insert a source line, of the program if possible, before the PTX line that ends a message."""
    own = [place for place in places if place.text is not None]
    place = next(iter(own or places), None)
    head, _, line = message.rpartition(" PTX line ")
    return message if place is None else f"{head} {place}, PTX line {line}"


def _number(arch: Arch) -> int:
    return 10 * arch.major + arch.minor


def _target_number(target: str) -> int:
    """Return the number of the architecture of a PTX file, which may be older than every GPU: sm_20."""
    return int("".join(filter(str.isdigit, target)))


def _most_threads(directives: tuple[str, ...]) -> int:
    """Return the most threads that `.maxntid` or `.reqntid` allows in a block."""
    numbers = _numbers(directives, ".maxntid") or _numbers(directives, ".reqntid") or [1024]
    return min(math.prod(numbers), 1024)


def _fixed_cluster(directives: tuple[str, ...]) -> base.Dim3 | None:
    """Return the cluster that a kernel fixes; zeros if every launch has to specify one."""
    numbers = _numbers(directives, ".reqnctapercluster")
    if _numbers(directives, ".blocksareclusters") is not None:
        return None
    if numbers is None:
        return None if _numbers(directives, ".explicitcluster") is None else (0, 0, 0)
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _numbers(directives: tuple[str, ...], word: str) -> list[int] | None:
    """Return the numbers of a directive, or None if the kernel does not have it."""
    for directive in directives:
        name, _, numbers = directive.partition(" ")
        if name == word:
            return [int(number) for number in numbers.split(",") if number]
    return None
