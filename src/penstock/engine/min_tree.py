"""A tree of minima, by which list schedulers and the event loop find the rank that can go on first."""

from __future__ import annotations

from penstock.engine.arrays import Floats


def leaves_for(num: int) -> int:
    """How many leaves a tree of `num` numbers has: the power of two that holds them. Its array is twice as long."""
    leaves = 1
    while leaves < num:
        leaves *= 2
    return leaves


def fill(tree: Floats) -> None:
    """Makes the minima above the leaves."""
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


def least_of(tree: Floats, leaves: int) -> int:
    """The number of the least leaf of a tree of minima (its root is `tree[1]`), the first of equals."""
    node = 1
    while node < leaves:
        node = 2 * node if tree[2 * node] <= tree[2 * node + 1] else 2 * node + 1
    return node - leaves


def sift(tree: Floats, node: int, value: float) -> None:
    """Gives a leaf another value and brings the minima above it up to date."""
    tree[node] = value
    node //= 2
    while node > 0:
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            return
        tree[node] = least
        node //= 2
