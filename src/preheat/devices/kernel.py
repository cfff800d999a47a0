"""Kernels, and the ways to launch them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from preheat.devices import base
from preheat.devices.launch import Bound, Launch
from preheat.devices.native_launch import make_launcher
from preheat.devices.stream import raw_stream
from preheat.errors import LaunchError, PreheatError, short_repr
from preheat.model.artifact import EntryPoint
from preheat.model.tracebacks import short_methods, shorten_traceback

if TYPE_CHECKING:  # `Module` makes kernels, so its module imports this one.
    from preheat.devices.module import Module

__all__ = ["Kernel"]

_CLUSTER = "cluster= is an integer, or a tuple of up to three: kernel.launch(…, cluster=2)"
_DIM = "an integer, or a tuple of up to three: kernel[8, 256], kernel[(8, 4), (32, 8)]"
_MAX_LAUNCHERS = 512  # of one kernel


@short_methods(without={"geometry", "launch"})
class Kernel:
    """A kernel that can be launched: `kernel[grid, block](*args)`.

    `gpu.kernel` and `module[name]` return it. Grid and block are numbers or tuples. `launch` takes the
    other settings of a launch by name, such as a stream. Two objects for the same entry of the same
    loaded module are equal.

    Examples:
        >>> saxpy = gpu.kernel(SAXPY, "saxpy")
        >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
        >>> saxpy[1, 32](3.0, x, y, 2)
        >>> y.numpy()
        array([3., 6.], dtype=float32)
        >>> saxpy[1, 32](3.0, x, y)
        Traceback (most recent call last):
        preheat.errors.LaunchError: saxpy: 3 arguments given, but the kernel takes 4 ...
    """

    def __init__(self, module: Module, entry: EntryPoint) -> None:
        self.module = module
        self.entry = entry
        self._context = module.context
        self._function, self._signature = module.function(entry)
        self._launchers: dict[object, Callable[..., None]] = {}

    @property
    def name(self) -> str:
        """The name of the kernel as in the source."""
        return self.entry.title

    @property
    def attributes(self) -> base.Attributes:
        """Registers, sizes of memory, maximum threads and dynamic shared memory, and versions."""
        self._context.require_alive(Launch.RECREATE)
        return self._function.attributes

    def occupancy(self, block: object, shared: int = 0) -> base.Occupancy:
        """Return how many blocks of this size one multiprocessor runs, and the fraction of its threads.

        Args:
            block: The block size, as in a launch.
            shared: Dynamic shared memory in bytes.

        Examples:
            >>> gpu.kernel(SAXPY, "saxpy").occupancy(256)
            Occupancy(blocks=8, fraction=1.0)
        """
        geometry = self._check_size(1, block, shared)
        return self._function.occupancy(math.prod(geometry.block), geometry.shared)

    def max_potential_block_size(
        self, shared: int | Callable[[int], int] = 0, *, limit: int | None = None
    ) -> base.BlockSize:
        """Return the block size with the best occupancy, and the smallest grid that fills the device.

        Args:
            shared: Dynamic shared memory in bytes, or a function from a block size to it.
            limit: The largest number of threads to try.

        Returns:
            A pair that can be launched: `kernel[size](…)`.

        Examples:
            >>> size = gpu.kernel(SAXPY, "saxpy").max_potential_block_size(limit=256)
            >>> size.block
            256
        """
        uses, limits = self.attributes, self._context.device.limits
        if limit is not None and (type(limit) is not int or limit < 1):
            raise LaunchError(self.name, f"limit is a number of threads, not {limit!r}")
        max_threads = (
            min(limits.threads, uses.threads) if limit is None else self._check_size(1, limit).block[0]
        )
        best, filled = None, 0
        for aligned in range(-(-max_threads // limits.warp) * limits.warp, 0, -limits.warp):
            block = min(aligned, max_threads)
            dynamic = self._bytes(shared(block) if callable(shared) else shared)
            if not 0 <= dynamic <= uses.dynamic_shared:
                continue
            blocks = self._function.occupancy(block, dynamic).blocks
            # Of blocks with equal occupancy, the largest wins, because it needs the smallest grid.
            if blocks * block > filled:
                best, filled = base.BlockSize(blocks * limits.processors, block), blocks * block
        if best is None:
            raise LaunchError(
                self.name,
                f"no block of up to {max_threads} threads can run with this dynamic shared memory; "
                f"a block can have {uses.dynamic_shared} bytes of it",
            )
        return best

    @property
    def carveout(self) -> int | None:
        """The preferred shared memory carveout of the L1 cache in percent; None for no preference.

        It can be set, and is a hint: a launch that needs more shared memory gets it.
        """
        self._context.require_alive(Launch.RECREATE)
        percent = self._function.carveout()
        return None if percent < 0 else percent

    @carveout.setter
    def carveout(self, percent: int | None) -> None:
        self._context.require_alive(Launch.RECREATE)
        if percent is not None and not (type(percent) is int and 0 <= percent <= 100):
            why = f"carveout {short_repr(percent)} is not a percentage"
            raise LaunchError(self.name, why, hint="an integer from 0 to 100, or None for any")
        self._function.set_carveout(-1 if percent is None else percent)

    def __getitem__(self, config: Any) -> Callable[..., None]:
        """Return a launcher for this grid and block, each an integer or a tuple of up to three."""
        try:
            try:
                return self._launchers[config]
            except (KeyError, TypeError):
                pass  # Errors below must not have this one as their context.
            return self._configure(config)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise `LaunchError`: a launch needs a grid and a block."""
        raise LaunchError(
            self.name, "a launch needs a grid and a block", hint=f"{self.name}[grid, block](…)"
        )

    def _configure(self, config: Any) -> Callable[..., None]:
        if not isinstance(config, tuple):
            raise LaunchError(
                self.name,
                f"kernel[grid, block] takes a grid and a block, not only {short_repr(config)}",
                hint="say how many threads a block has: kernel[grid, 256]",
            )
        if len(config) != 2:
            raise LaunchError(
                self.name,
                f"kernel[grid, block] takes two values, a grid and a block, not {len(config)}",
                hint="several axes are a tuple: kernel[(8, 4), (32, 8)]; the rest goes by name: "
                "kernel.launch(…, grid=, block=, shared=, stream=)",
            )
        return self._remember(config, self._launch(self.geometry(*config), None))

    def _remember(self, key: object, launch: Launch) -> Callable[..., None]:
        """Return the launch as a callable, and store it under `key`."""
        if len(self._launchers) >= _MAX_LAUNCHERS:
            self._launchers.clear()
        launcher = make_launcher(launch)
        with suppress(TypeError):  # A geometry with lists cannot be a key.
            self._launchers[key] = launcher
        return launcher

    def launch(
        self,
        *args: Any,
        grid: object,
        block: object,
        shared: int = 0,
        stream: object = None,
        cluster: object = None,
        cooperative: bool = False,
        programmatic: bool = False,
        **named: Any,
    ) -> None:
        """Launch the kernel with all settings that a launch has.

        Args:
            args: The arguments of the kernel.
            grid: The number of blocks, or a tuple.
            block: The number of threads of a block, or a tuple.
            shared: Dynamic shared memory in bytes.
            stream: The stream. The default is the device's, or the current stream of the library
                whose tensors are among the arguments.
            cluster: The size of a cluster in blocks.
            cooperative: Allow the grid to synchronise.
            programmatic: Allow the kernel to start before the preceding launch has completed.
            named: Arguments of the kernel by name, if their names are known.

        Raises:
            LaunchError: An argument, the grid or the block does not fit the kernel or the device.

        Examples:
            >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
            >>> gpu.kernel(SAXPY, "saxpy").launch(2.0, x, y, 2, grid=1, block=32)
        """
        try:
            if named:
                self._signature.refuse_names(named)
            raw = None if stream is None else raw_stream(self._context, stream)
            key = (grid, block, shared, cluster, cooperative, programmatic, raw and raw.id)
            try:
                launcher = self._launchers[key]
            except (KeyError, TypeError):
                launcher = None
            if launcher is None:
                geometry = self.geometry(grid, block, shared, cluster, cooperative, programmatic)
                launcher = self._remember(key, self._launch(geometry, raw))
            launcher(*args)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def bind(
        self,
        *args: Any,
        grid: object,
        block: object,
        shared: int = 0,
        stream: object = None,
        cluster: object = None,
        cooperative: bool = False,
        programmatic: bool = False,
        **named: Any,
    ) -> Bound:
        """Fix all arguments and settings, so that a call costs little more than the call of the driver.

        See `launch` for the arguments.

        Examples:
            >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
            >>> step = gpu.kernel(SAXPY, "saxpy").bind(2.0, x, y, 2, grid=1, block=32)
            >>> step()
        """
        if named:
            self._signature.refuse_names(named)
        geometry = self.geometry(grid, block, shared, cluster, cooperative, programmatic)
        launch = self._launch(geometry, None if stream is None else raw_stream(self._context, stream))
        return Bound(launch, args, stream)

    def prepare(self, grid: object, block: object) -> Launch:
        """Return a launch with this grid and block, for any arguments and stream."""
        return self._launch(self.geometry(grid, block), None)

    def _launch(self, geometry: base.Geometry, stream: base.Stream | None) -> Launch:
        module = self.module
        return Launch(
            self._context, self._function, self._signature, geometry, stream,
            module=module, blocking=module.blocking,
        )  # fmt: skip

    # Geometry

    def geometry(
        self,
        grid: object,
        block: object,
        shared: int = 0,
        cluster: object = None,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> base.Geometry:
        """Return a geometry, checked for this kernel and its device.

        See `launch` for the arguments.

        Raises:
            LaunchError: The device cannot launch it.

        Examples:
            >>> gpu.kernel(SAXPY, "saxpy").geometry(4, (16, 16)).block
            (16, 16, 1)
        """
        try:
            geometry = self._check_size(grid, block, shared)
            if cluster is not None or cooperative or programmatic:
                geometry = geometry._replace(
                    cluster=None if cluster is None else self._dim("cluster", cluster),
                    cooperative=bool(cooperative),
                    programmatic=bool(programmatic),
                )
            if geometry.cluster is not None or self._function.bounds.cluster is not None:
                self._check_cluster(geometry)
            return geometry
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def _check_size(self, grid: object, block: object, shared: int = 0) -> base.Geometry:
        """Check grid, block and shared memory against the limits."""
        if self._context.lost is not None:
            self._context.require_alive(Launch.RECREATE)
        limits = self._context.device.limits
        uses = self._function.bounds
        geometry = base.Geometry(
            self._dim("grid", grid, limits.grid),
            self._dim("block", block, limits.block),
            shared if type(shared) is int else self._bytes(shared),
        )
        threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
        if threads > min(limits.threads, uses.threads):
            why = f"of {self.name}" if uses.threads < limits.threads else "on this device"
            max_threads = min(limits.threads, uses.threads)
            raise LaunchError(
                self.name, f"a block of {threads} threads; the maximum {why} is {max_threads}"
            )
        if geometry.shared < 0 or geometry.shared + uses.shared > limits.shared_optin:
            raise LaunchError(
                self.name,
                f"{geometry.shared} bytes of dynamic and {uses.shared} of static shared memory; "
                f"a block can have {limits.shared_optin}",
            )
        return geometry

    def _bytes(self, shared: Any) -> int:
        try:
            return operator.index(shared)
        except TypeError:
            raise LaunchError(
                self.name, f"shared {short_repr(shared)} is not a number of bytes"
            ) from None

    def _dim(self, what: str, given: Any, limits: base.Dim3 | None = None) -> base.Dim3:
        if type(given) is int and limits is not None and 1 <= given <= limits[0]:
            return (given, 1, 1)  # Most grids and blocks.
        parts = given if isinstance(given, tuple | list) else (given,)
        try:
            sizes = [operator.index(part) for part in parts]
        except TypeError:
            raise LaunchError(
                self.name, f"{what} {short_repr(given)} is not one to three integers", hint=_DIM
            ) from None
        if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
            raise LaunchError(
                self.name,
                f"{what} {short_repr(given)} is not one to three positive integers",
                hint=_DIM,
            )
        x, y, z = (*sizes, 1, 1)[:3]
        if limits is not None and (x > limits[0] or y > limits[1] or z > limits[2]):
            raise LaunchError(
                self.name, f"{what} {(x, y, z)} exceeds the limits of the device, {limits}"
            )
        return (x, y, z)

    def _check_cluster(self, made: base.Geometry) -> None:
        fixed = self._function.bounds.cluster
        max_blocks = self._context.device.limits.cluster
        if fixed is not None and not any(fixed):
            if made.cluster is None:
                why = "__cluster_dims__() has no size, so every launch needs cluster="
                raise LaunchError(self.name, why, hint=_CLUSTER)
            fixed = None
        if fixed is not None and made.cluster not in (None, fixed):
            why = f"cluster {made.cluster}, but __cluster_dims__ fixes it to {fixed}"
            raise LaunchError(self.name, why, hint="launch it without cluster=")
        cluster = made.cluster or fixed
        if cluster is None:
            return
        blocks = math.prod(cluster)
        if blocks > max_blocks:
            raise LaunchError(
                self.name, f"a cluster of {blocks} blocks; the device allows {max_blocks}"
            )
        if any(whole % part for whole, part in zip(made.grid, cluster, strict=True)):
            raise LaunchError(self.name, f"grid {made.grid} is not a multiple of the cluster {cluster}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Kernel):
            return NotImplemented
        return self.module is other.module and self.entry.name == other.entry.name

    def __hash__(self) -> int:
        return hash((id(self.module), self.entry.name))

    def __repr__(self) -> str:
        return f"<Kernel {self.entry.prototype} on {self._context.device.name}>"
