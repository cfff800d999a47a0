"""The settings of the CPU driver, from the environment of the process that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from preheat.errors import ConfigError, InputError
from preheat.model.arch import Arch

__all__ = ["MAX_DEVICES", "DriverSettings", "gpu_refusal", "is_seed"]

#: This file exists where the driver of a GPU is loaded.
_GPU_DRIVER = Path("/proc/driver/nvidia/version")
_ARCH = Arch(9, 0)
MAX_DEVICES = 8
_MAX_SEED = 1 << 62
_OFF = {"", "0", "false", "no", "off"}


@dataclass(frozen=True, kw_only=True)
class DriverSettings:
    """What the driver shows to programs.

    Attributes:
        arch: The architecture of every device.
        devices: How many devices there are.
        schedule: The seed of the order in which deferred streams execute; None executes work at once.
        sanitize: Whether kernels stop at values that CUDA leaves undefined.
        blocking: Whether each launch waits for its kernels: CUDA_LAUNCH_BLOCKING of the CUDA driver.
        beside_gpu: Whether it may start on a machine that has the driver of a GPU.
        report: The directory to which processes write what they have done, or None.
    """

    arch: Arch = _ARCH
    devices: int = 1
    schedule: int | None = 0
    sanitize: bool = False
    blocking: bool = False
    beside_gpu: bool = False
    report: Path | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> DriverSettings:
        """Read the variables `PREHEAT_EMULATE_…`. An invalid value is a `ConfigError`."""
        return cls(
            arch=_read_arch(env, "PREHEAT_EMULATE_ARCH"),
            devices=_read_number(env, "PREHEAT_EMULATE_DEVICES", 1, limit=MAX_DEVICES) or 1,
            schedule=_read_seed(env, "PREHEAT_EMULATE_SCHEDULE"),
            sanitize=env.get("PREHEAT_EMULATE_SANITIZE", "").lower() not in _OFF,
            beside_gpu=env.get("PREHEAT_EMULATE_BESIDE_GPU", "").lower() not in _OFF,
            report=Path(text) if (text := env.get("PREHEAT_EMULATE_REPORT", "")) else None,
            blocking=env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        )


def gpu_refusal(settings: DriverSettings) -> str | None:
    """Return why the CPU driver does not start on this machine, or None if it does."""
    if settings.beside_gpu or not _GPU_DRIVER.exists():
        return None
    return (
        "this machine has a GPU, and the CPU driver would be used in its place: pass --beside-gpu to "
        "'preheat emulate', or set PREHEAT_EMULATE_BESIDE_GPU=1, if you want that"
    )


def is_seed(text: str) -> bool:
    """Return whether a text is a seed of deferred streams, or says that there are none."""
    return text == "off" or _is_number(text, _MAX_SEED)


def _read_arch(env: Mapping[str, str], name: str) -> Arch:
    text = env.get(name, "").strip()
    try:
        return Arch.parse(text or _ARCH).plain
    except InputError:
        raise ConfigError(name, text, "the name of an architecture, such as sm_90") from None


def _read_seed(env: Mapping[str, str], name: str) -> int | None:
    return None if env.get(name) == "off" else _read_number(env, name, 0)


def _is_number(text: str, limit: int) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= limit


def _read_number(env: Mapping[str, str], name: str, default: int, *, limit: int = _MAX_SEED) -> int:
    text = env.get(name, "").strip()
    if text and not _is_number(text, limit):
        raise ConfigError(name, text, f"a whole number of at most {limit:,}")
    return int(text or default)
