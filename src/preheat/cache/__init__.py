"""Digest to bytes, in tiers. Knows nothing of CUDA and could be lifted out and used for anything."""

from preheat.cache.base import Found, Store
from preheat.cache.chain import Chain
from preheat.cache.disk import DiskStore
from preheat.cache.layer import LayerStore
from preheat.cache.memory import MemoryStore

__all__ = ["Chain", "DiskStore", "Found", "LayerStore", "MemoryStore", "Store"]
