"""Errors of the CUDA driver, for tests that let a call fail."""

from __future__ import annotations

from preheat.errors import DriverError, OutOfMemoryError


def illegal_address(call: str) -> DriverError:
    """Return an error that ends the context of its device."""
    meaning = "an illegal memory access was encountered"
    return DriverError(call, 700, "CUDA_ERROR_ILLEGAL_ADDRESS", meaning, sticky=True)


def not_supported(call: str) -> DriverError:
    """Return an error after which the context can still be used."""
    return DriverError(call, 801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported")


def out_of_memory(call: str) -> OutOfMemoryError:
    """Return the error of an allocation that fails; a later attempt may succeed."""
    return OutOfMemoryError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
