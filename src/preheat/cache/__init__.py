"""Digest to bytes, in tiers. Knows nothing of CUDA and could be lifted out and used for anything."""

from preheat.cache.base import Found, Tier
from preheat.cache.chain import Chain
from preheat.cache.disk import DiskTier
from preheat.cache.layer import LayerTier
from preheat.cache.memory import MemoryTier

__all__ = ["Chain", "DiskTier", "Found", "LayerTier", "MemoryTier", "Tier"]
