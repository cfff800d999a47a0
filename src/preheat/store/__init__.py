"""Digest to bytes, in tiers. Knows nothing of CUDA and could be lifted out and used for anything."""

from preheat.store.base import Found, Store
from preheat.store.chain import Chain
from preheat.store.disk import DiskStore, LayerStore
from preheat.store.memory import MemoryStore

__all__ = ["Chain", "DiskStore", "Found", "LayerStore", "MemoryStore", "Store"]
