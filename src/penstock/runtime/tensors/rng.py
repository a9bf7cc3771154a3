"""Randomness that does not depend on the schedule, the number of ranks or the partition.

A pipeline runs layers in another order than a plain loop, and in other processes. So each layer's random
draws (dropout) come from a seed made of (seed, step, microbatch, layer), and a plain loop that uses the
same seeds draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """One 63-bit seed from several counters (splitmix64 finaliser)."""
    state = 0
    for part in parts:
        state = (state + part + _MIX) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generator that ops on `device` draw from (and the CPU's)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


@contextmanager
def restored(device: torch.device) -> Iterator[None]:
    """Leaves the generators as they were found, so that the user's own draws are not disturbed."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
