"""Kernels as operators of torch, which `torch.compile`, autograd and CUDA graphs handle as their own.

    scale = op(
        "my::scale(Tensor x, float a) -> Tensor",
        SOURCE,                                                     # __global__ void scale(…)
        out=lambda x, a: torch.empty_like(x),
        args=lambda x, a, y: (x, a, y, x.numel()),
        grid=lambda x, a, y: -(-x.numel() // 256),
        block=256,
    )
    y = scale(x, 2.0)                                               # or torch.ops.my.scale(x, 2.0)

`out` allocates the returned tensors, and describes them to `torch.compile`. The other functions get the
arguments in the order of the schema, and then the returned tensors. The kernel is compiled when the
operator first runs, and is recorded, baked and sealed like every kernel of preheat.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preheat.adapters.base import directory_of
from preheat.adapters.torch.operator_kernel import (
    KernelChoice,
    LoadedKernel,
    OperatorKernel,
    operator_kernel,
)
from preheat.adapters.torch.schema import Schema
from preheat.devices.kernel import Kernel
from preheat.devices.operands import Pointer
from preheat.errors import PreheatError, short_repr
from preheat.model.tracebacks import shorten_traceback
from preheat.process.callsite import exclude_library
from preheat.process.messages import count

__all__ = ["op"]

Tensor = Any  # torch is imported when an operator is made
Size = int | tuple[int, ...]
_NULL = Pointer(0)
# The names of files with code that `torch.compile` generates.
_GENERATED = ("<eval_with_key>", os.path.join(tempfile.gettempdir(), "torchinductor_"))


def op(
    schema: str,
    kernel: KernelChoice,
    *,
    grid: Size | Callable[..., Size],
    block: Size | Callable[..., Size],
    shared: int | Callable[..., int] = 0,
    args: Callable[..., Sequence[object]] | None = None,
    out: Callable[..., Tensor | Sequence[Tensor]] | None = None,
    backward: Callable[..., object] | None = None,
    setup_context: Callable[..., None] | None = None,
    cluster: Size | None = None,
    cooperative: bool = False,
    label: str | None = None,
    options: Sequence[str] | None = (),
    include: Iterable[str | os.PathLike[str]] | None = (),
    headers: Mapping[str, str] | None = None,
    device: str | None = None,
) -> Any:
    """Register an operator of torch that launches a kernel, and return it.

    Tensors of a GPU are computed there, in torch's current stream. Tensors of the host are refused
    unless `device`, or else `PREHEAT_DEVICE`, is an emulator that accepts them.

    Args:
        schema: A schema of `torch.library`: the name, the arguments, of which `Tensor(a!) x` is written
            to, and the returned tensors.
        kernel: A source as for `gpu.kernel`, whose kernel has the name of the operator, a pair of a
            source and the name of a kernel, or a kernel that is loaded. The name may be a function that
            chooses it, such as the instance of a template for the type of a tensor.
        grid: The grid, or a function of the arguments of the operator and then of the returned tensors.
            Keyword-only arguments are passed in their order. A grid with a zero launches nothing.
        block: The block, or such a function.
        shared: Dynamic shared memory in bytes, or such a function.
        args: Such a function that returns the arguments of the kernel. By default, these are the
            arguments of the operator and the returned tensors. None is a null pointer.
        out: A function of the arguments of the operator that returns the tensors that the operator
            returns.
        backward: As in `torch.library.register_autograd`. An operator that writes to its arguments has
            none.
        setup_context: As in `torch.library.register_autograd`.
        cluster: See `Kernel.launch`.
        cooperative: See `Kernel.launch`.
        label: See `Gpu.kernel`.
        options: See `Gpu.kernel`.
        include: See `Gpu.kernel`.
        headers: See `Gpu.kernel`.
        device: The emulator for tensors of the host: `"emulator[host_arrays]"`.

    Raises:
        InputError: The schema is wrong or does not fit the other arguments, or the operator exists.

    Examples:
        >>> import torch
        >>> from preheat.adapters.torch import op
        >>> SCALE = 'extern "C" __global__ void scale(float* x, float a) { x[threadIdx.x] *= a; }'
        >>> schema = "mine::scale(Tensor(a!) x, float a) -> ()"
        >>> on = "emulator[host_arrays]"
        >>> scale = op(schema, SCALE, grid=1, block=lambda x, a: len(x), device=on)
        >>> x = torch.tensor([1.0, 2.0])
        >>> scale(x, 3.0)
        >>> x
        tensor([3., 6.])
    """
    try:
        parsed = Schema.parse(schema)
        _check(parsed, args, out, backward, setup_context)
        settings = {"label": label, "options": options, "include": include, "headers": headers}
        chosen = operator_kernel(parsed, kernel, settings, device)
        operator = _Operator(
            parsed, chosen, grid, block, shared, args, out, cluster, cooperative=cooperative
        )
        operator.check_count()
        return _register(operator, backward, setup_context)
    except PreheatError as error:
        shorten_traceback(error)
        raise


def _check(
    schema: Schema,
    args: object,
    out: object,
    backward: object,
    setup_context: object,
) -> None:
    """Raise `InputError` if the schema and the functions contradict each other."""
    for name, given in (("args", args), ("out", out), ("backward", backward)):
        if given is not None and not callable(given):
            raise schema.error(f"{name} is a function, not {short_repr(given)}")
    if schema.returns and out is None:
        raise schema.error(
            f"it returns {count(schema.returns, 'tensor')}, and there is no out=",
            "out=lambda x, …: torch.empty_like(x)",
        )
    if out is not None and not schema.returns:
        raise schema.error(
            "it returns nothing, and out= makes tensors", "write -> Tensor in the schema"
        )
    if args is None:
        schema.plain_arguments()
    if backward is not None and schema.mutated:
        raise schema.error(
            f"it writes to {', '.join(schema.mutated)}, so torch cannot differentiate it",
            "return a new tensor instead",
        )
    if setup_context is not None and backward is None:
        raise schema.error("setup_context= is given, and backward= is not")


def _register(operator: _Operator, backward: Any, setup_context: Any) -> Any:
    """Register an operator with torch."""
    import torch

    schema = operator.schema
    namespace, _, name = schema.name.partition("::")
    if hasattr(getattr(torch.ops, namespace), name):
        raise schema.error("there is an operator of this name", "choose another name or namespace")
    # The lines of torch, and of code that it generates, are between the program and the launch.
    for place in (directory_of(torch), *_GENERATED):
        exclude_library(place)
    made = torch.library.custom_op(
        schema.name, operator.run, mutates_args=schema.mutated, device_types=(),
        schema=schema.signature,
    )  # fmt: skip
    places = ["cuda", *(["cpu"] if operator.kernel.host is not None else [])]
    # `custom_op` would import Dynamo at the first call on these devices.
    torch.library.impl(schema.name, places, _hidden_from_dynamo(operator.run))
    made.register_fake(operator.fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=setup_context)
    return getattr(getattr(torch.ops, namespace), name).default


def _hidden_from_dynamo(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, which Dynamo does not trace.

    Dynamo traces every function that runs between the parts of a graph with a break. It is not imported
    here, because that takes as long as the import of torch.
    """
    hidden: list[Callable[..., Any]] = []

    def call(*given: object, **named: object) -> Any:
        if "torch._dynamo" not in sys.modules:
            return run(*given, **named)
        if not hidden:
            from torch.compiler import disable

            hidden.append(disable(run))
        return hidden[0](*given, **named)

    return call


@dataclass(frozen=True)
class _Operator:
    """What torch calls: `run` with tensors, and `fake` with tensors that have no memory."""

    schema: Schema
    kernel: OperatorKernel
    grid: Any
    block: Any
    shared: Any
    args: Callable[..., Sequence[object]] | None
    out: Callable[..., Tensor | Sequence[Tensor]] | None
    cluster: Size | None
    cooperative: bool

    def run(self, *given: object, **named: object) -> Any:
        """Allocate the results, launch the kernel, and return the results."""
        values = self.schema.bind(given, named)
        results = self._allocate(values)
        self._check_new(values, results)
        self._launch((*values, *results))
        return self._returned(results)

    def fake(self, *given: object, **named: object) -> Any:
        """Return results without values, for given tensors without values."""
        return self._returned(self._allocate(self.schema.bind(given, named)))

    def check_count(self) -> None:
        """Raise `InputError` if the kernel is known and takes another number of arguments."""
        if self.args is None and isinstance(self.kernel, LoadedKernel):
            self._check_count(self.kernel.kernel)

    def _check_count(self, kernel: Kernel) -> None:
        given = len(self.schema.arguments) + self.schema.returns
        takes = len(kernel.entry.parameters)
        if given != takes:
            raise self.schema.error(
                f"the kernel {kernel.name} takes {count(takes, 'argument')}, and the schema has "
                f"{len(self.schema.arguments)} and {count(self.schema.returns, 'result')}",
                "name the arguments of the kernel: args=lambda x, …: (x, …, x.numel())",
            )

    def _allocate(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        if self.out is None:
            return ()
        import torch

        made = self.out(*values)
        results = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        wrong = [each for each in results if not isinstance(each, torch.Tensor)]
        if wrong or len(results) != self.schema.returns:
            found = f"{short_repr(wrong[0])}" if wrong else count(len(results), "tensor")
            raise self.schema.error(
                f"out= made {found}, and the schema returns {count(self.schema.returns, 'tensor')}"
            )
        return results

    def _check_new(self, values: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Raise `InputError` if a result shares its memory with an argument: torch forbids that."""
        import torch

        taken = [_memory(each) for each in values if isinstance(each, torch.Tensor)]
        if any(_memory(each) in taken for each in results if each.numel()):
            raise self.schema.error("out= returned the memory of an argument", "make a new tensor")

    def _returned(self, results: tuple[Tensor, ...]) -> Any:
        return None if not results else results[0] if len(results) == 1 else results

    def _launch(self, known: tuple[Any, ...]) -> None:
        grid = _value(self.grid, known)
        if 0 in (grid if isinstance(grid, tuple | list) else (grid,)):
            return
        kernel = self.kernel.on_device_of(_first_tensor(known), known)
        if self.args is None:
            self._check_count(kernel)
        given = known if self.args is None else self.args(*known)
        kernel.launch(
            *(_NULL if each is None else each for each in given),
            grid=grid,
            block=_value(self.block, known),
            shared=_value(self.shared, known),
            cluster=self.cluster,
            cooperative=self.cooperative,
        )


def _value(setting: Any, known: tuple[Any, ...]) -> Any:
    return setting(*known) if callable(setting) else setting


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is in."""
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _first_tensor(known: Sequence[Any]) -> Tensor:
    import torch

    return next(each for each in known if isinstance(each, torch.Tensor))
