"""A cache of bytes by digest, in several tiers. It does not depend on CUDA or on how code is built."""

from preheat.cache.base import Found, Tier
from preheat.cache.chain import Chain
from preheat.cache.disk import DiskTier
from preheat.cache.layer import LayerTier
from preheat.cache.memory import MemoryTier

__all__ = ["Chain", "DiskTier", "Found", "LayerTier", "MemoryTier", "Tier"]
