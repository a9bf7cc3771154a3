"""Where ranks leave messages for each other beside the training: queues in this process, a TCPStore, or Redis."""

from penstock.runtime.adapt.store.in_process import InProcessStore
from penstock.runtime.adapt.store.open import open_store
from penstock.runtime.adapt.store.store import Store, StoreLost

__all__ = ["InProcessStore", "Store", "StoreLost", "open_store"]
