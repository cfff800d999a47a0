"""A cache of bytes by digest, in several tiers. It does not depend on CUDA or on how code is built."""

from preheat.store.base import Found, Tier
from preheat.store.chain import Chain
from preheat.store.disk import DiskTier
from preheat.store.layer import LayerTier
from preheat.store.memory import MemoryTier

__all__ = ["Chain", "DiskTier", "Found", "LayerTier", "MemoryTier", "Tier"]
