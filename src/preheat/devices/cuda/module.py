"""Modules and functions of a GPU.

They are loaded by `cuModule`, not by `cuLibrary`: see docs/decisions/0005-modules.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from preheat import native
from preheat.devices.base import (
    DEFAULT_STREAMS,
    Attributes,
    Bounds,
    Dim3,
    Geometry,
    Occupancy,
    Stream,
    Submit,
    Symbol,
)
from preheat.devices.cuda.driver import call, function_address, library
from preheat.errors import DriverError
from preheat.model.artifact import Artifact
from preheat.process.lazy import lazy

if TYPE_CHECKING:
    from preheat.devices.cuda.device import CudaDevice

__all__ = ["CudaFunction", "CudaModule"]

_NOT_FOUND = 500
_FUNC_LOAD = 12040  # the version of CUDA in which cuFuncLoad was added
_PORTABLE_CLUSTER = 8  # blocks; a function must opt in to more


class CudaModule:
    """A cubin that is loaded on a GPU."""

    def __init__(self, device: CudaDevice, artifact: Artifact, *, jit: bool) -> None:
        self.device = device
        code = artifact.ptx + b"\0" if jit else artifact.cubin
        if native.core is not None:
            load = function_address("cuModuleLoadData")
            handle = native.core.load_module(device.context_calls, load, code)
            if handle is not None:
                self._module = library().CUmodule(handle)
                return
        # There is no native core, or a call failed: this makes it again, and raises its error.
        with device.current():
            self._module = call("cuModuleLoadData", code)

    def function(self, name: str) -> CudaFunction:
        """Return the kernel with this entry name, loaded, so that a launch loads nothing."""
        if native.core is not None and (calls := _resolve_calls()) is not None:
            clusters = self.device.limits.cluster > 0
            loaded = native.core.load_function(
                self.device.context_calls, *calls, int(self._module), name.encode(), clusters
            )
            if loaded is not None:
                handle, bounds = loaded
                function = library().CUfunction(handle)
                return CudaFunction(self.device, name, function, Bounds(*bounds))
        with self.device.current():
            function = call("cuModuleGetFunction", self._module, name.encode())
            call("cuFuncLoad", function)
            bounds = _bounds(function, clusters=self.device.limits.cluster > 0)
        return CudaFunction(self.device, name, function, bounds)

    def symbol(self, name: str) -> Symbol | None:
        """Return the variable with this name, or None."""
        try:
            with self.device.current():
                address, size = call("cuModuleGetGlobal", self._module, name.encode())
        except DriverError as error:
            if error.code == _NOT_FOUND:
                return None
            raise
        return Symbol(int(address), size)

    def unload(self) -> None:
        """Unload the module."""
        with self.device.current():
            call("cuModuleUnload", self._module)


class CudaFunction:
    """A kernel of a loaded module."""

    def __init__(self, device: CudaDevice, name: str, function: Any, bounds: Bounds) -> None:
        self.device = device
        self.name = name
        self.bounds = bounds
        self._function = function
        self._opted_in = False  # to more shared memory than a function has by default

    @lazy
    def attributes(self) -> Attributes:
        """The attributes that the driver reports."""
        threads, shared, cluster = self.bounds
        with self.device.current():
            get = partial(_get, self._function)
            return Attributes(
                registers=get("NUM_REGS"),
                shared=shared,
                local=get("LOCAL_SIZE_BYTES"),
                constant=get("CONST_SIZE_BYTES"),
                threads=threads,
                binary_version=get("BINARY_VERSION"),
                ptx_version=get("PTX_VERSION"),
                dynamic_shared=self._most_dynamic_shared,
                cluster=cluster,
                cache_mode_ca=get("CACHE_MODE_CA"),
            )

    @property
    def _most_dynamic_shared(self) -> int:
        return self.device.limits.shared_optin - self.bounds.shared  # Launches opt in to all of it.

    def prepare(self, geometry: Geometry, stream: Stream) -> Submit:
        """Prepare a launch: everything but the parameters is fixed."""
        self._opt_in(geometry.shared, geometry.cluster)
        if geometry.cluster or geometry.cooperative or geometry.programmatic:
            submit = self._prepare_extended(geometry, stream)
        elif native.core is not None:
            return self._prepare_native(geometry, stream)
        else:
            submit = self._prepare_plain(geometry, stream)
        return self.device.launch_in_context(submit, stream)

    def _prepare_plain(self, geometry: Geometry, stream: Stream) -> Submit:
        cu = library()
        handle = cu.CUstream(stream.handle)
        return partial(
            cu.cuLaunchKernel, self._function, *geometry.grid, *geometry.block, geometry.shared, handle
        )

    def _prepare_native(self, geometry: Geometry, stream: Stream) -> Submit:
        launch = function_address("cuLaunchKernel")
        prepare: Callable[..., Submit] = partial(
            native.core.KernelLaunch, launch, int(self._function), geometry.grid, geometry.block,
            geometry.shared, stream.handle,
        )  # fmt: skip
        if stream.handle not in DEFAULT_STREAMS:
            return prepare()
        return prepare(self.device.launch_in_context(prepare(), stream))

    def _prepare_extended(self, geometry: Geometry, stream: Stream) -> Submit:
        cu = library()
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
        config.sharedMemBytes = geometry.shared
        config.hStream = stream.handle
        config.attrs = _launch_attributes(cu, geometry)
        config.numAttrs = len(config.attrs)
        return partial(cu.cuLaunchKernelEx, config, self._function)

    def _opt_in(self, shared: int, cluster: Dim3 | None = None) -> None:
        """Raise the default limits of the function where a launch needs more."""
        bounds = self.bounds
        if shared + bounds.shared > self.device.limits.shared and not self._opted_in:
            self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", self._most_dynamic_shared)
            self._opted_in = True  # to the maximum, so that no later launch needs more
        cluster = cluster or bounds.cluster
        if cluster is not None and math.prod(cluster) > _PORTABLE_CLUSTER:
            self._set("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)

    def _set(self, attribute: str, value: int) -> None:
        with self.device.current():
            call("cuFuncSetAttribute", self._function, _attribute(attribute), value)

    def occupancy(self, threads: int, shared: int = 0) -> Occupancy:
        """Return the occupancy of blocks with this number of threads."""
        self._opt_in(shared)
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        with self.device.current():
            blocks = int(call(name, self._function, threads, shared))
        return Occupancy(blocks, blocks * threads / self.device.processor_threads)

    def carveout(self) -> int:
        """Return the preferred carveout in percent; -1 for no preference."""
        with self.device.current():
            return _get(self._function, "PREFERRED_SHARED_MEMORY_CARVEOUT")

    def set_carveout(self, percent: int) -> None:
        """Set the preferred carveout."""
        self._set("PREFERRED_SHARED_MEMORY_CARVEOUT", percent)


@cache
def _resolve_calls() -> tuple[int, int, int] | None:
    """Return the functions of the driver that resolve a kernel; None if the driver lacks one."""
    load = function_address("cuFuncLoad", _FUNC_LOAD)
    get, attribute = map(function_address, ("cuModuleGetFunction", "cuFuncGetAttribute"))
    return (get, load, attribute) if load else None


def _bounds(function: Any, *, clusters: bool) -> Bounds:
    """Return what a launch is checked against; the context of the function is current."""
    threads = _get(function, "MAX_THREADS_PER_BLOCK")
    shared = _get(function, "SHARED_SIZE_BYTES")
    if not clusters or not _get(function, "CLUSTER_SIZE_MUST_BE_SET"):
        return Bounds(threads, shared)
    axes = ("WIDTH", "HEIGHT", "DEPTH")
    width, height, depth = (_get(function, f"REQUIRED_CLUSTER_{axis}") for axis in axes)
    return Bounds(threads, shared, (width, height, depth))


def _get(function: Any, attribute: str) -> int:
    return int(call("cuFuncGetAttribute", _attribute(attribute), function))


@cache
def _attribute(name: str) -> Any:
    return getattr(library().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")


def _launch_attributes(cu: Any, geometry: Geometry) -> list[Any]:
    """Return the launch attributes that `geometry` needs, as objects of the driver."""
    kinds = cu.CUlaunchAttributeID
    attributes = []

    def attribute(kind: Any) -> Any:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = kind
        return attributes[-1].value

    if geometry.cluster is not None:
        dimension = attribute(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
        dimension.x, dimension.y, dimension.z = geometry.cluster
    if geometry.cooperative:
        attribute(kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
    if geometry.programmatic:
        kind = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute(kind).programmaticStreamSerializationAllowed = 1
    return attributes
