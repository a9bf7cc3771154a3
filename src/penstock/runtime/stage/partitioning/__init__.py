"""Cuts any module into stages: finds its layers, traces what its forward does between them, refuses what it must."""

from penstock.runtime.stage.partitioning.cutting import Split, split

__all__ = ["Split", "split"]
