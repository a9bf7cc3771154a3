"""Keeps memory that a step frees in the process, since the next step needs it again."""

from __future__ import annotations

import torch

KEPT = 28 << 20
"""Bytes; glibc's limit grows up to 32 MiB."""


def warm_up_malloc() -> None:
    """Makes glibc keep freed memory, as it does once a program has freed one large tensor.

    Otherwise each step returns its activations to the system and faults them in again, page by page. On one core of
    an AMD EPYC that was 800 to 1800 faults per step of a small GPT, or 3% of its time.
    """
    torch.empty(KEPT, dtype=torch.uint8)  # freed at once
