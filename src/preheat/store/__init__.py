"""Bytes by digest, anywhere. Nothing here depends on CUDA or on how code is built."""

from preheat.store.base import Found, Store
from preheat.store.chain import Chain
from preheat.store.disk import DiskStore
from preheat.store.layer import LayerStore
from preheat.store.memory import MemoryStore

__all__ = ["Chain", "DiskStore", "Found", "LayerStore", "MemoryStore", "Store"]
