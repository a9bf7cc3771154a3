"""Where ranks leave messages for each other beside the training: queues in this process, a TCPStore, or Redis."""

from penstock.runtime.stores.in_process import InProcessStore
from penstock.runtime.stores.open import open_store
from penstock.runtime.stores.store import Store, StoreLost

__all__ = ["InProcessStore", "Store", "StoreLost", "open_store"]
