"""BitPipe (Wu et al. 2024) and vChimera (FlexPipe, section 7.1): Chimera with two stages per rank each way."""

from __future__ import annotations

from penstock.library.deepest_first import Backward, deepest_first
from penstock.library.options import whole_multiple
from penstock.program.placements import bidirectional, circular, v_shape
from penstock.schedule import Schedule


def bitpipe(num_ranks: int, num_microbatches: int, backward: Backward = "whole") -> Schedule:
    """Two interleaved pipelines of 2p stages in opposite directions: stage s on rank s mod p, or that from below.

    Two ranks; pipeline 0 goes 0 1 0 1, pipeline 1 goes 1 0 1 0:

        rank 0 | 0F0 1F1 2F0 3F1 3B1 2B0 1B1 0B0 0F2 1F3 ...
        rank 1 | 0F1 1F0 2F1 3F0 3B0 2B1 1B0 0B1 0F3 1F2 ...

    Bubble X = p - 2 stage times, (p - 2)/2 in full ones, half of Chimera's, see `deepest_first`. Peak 2 min(p, N)
    stage activations, min(p, N) full ones. The gradients of the two copies of a stage add up.

    Args:
        backward: "whole", or "split" into I and W.
    """
    whole_multiple("bitpipe", "ranks", num_ranks, "pipelines", 2)
    placement = bidirectional(circular(num_ranks, 2 * num_ranks))
    return deepest_first("bitpipe", placement, num_ranks, num_microbatches, backward)


def vchimera(num_ranks: int, num_microbatches: int, backward: Backward = "whole") -> Schedule:
    """A V from the first rank down and back, and one from the last rank up and back.

    Two ranks; pipeline 0 goes 0 1 1 0, pipeline 1 goes 1 0 0 1:

        rank 0 | 0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0 0F2 1F3 ...
        rank 1 | 0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1 0F3 1F2 ...

    Bubble, peak and options are those of `bitpipe`; a V saves the message between its two middle stages.
    """
    whole_multiple("vchimera", "ranks", num_ranks, "pipelines", 2)
    placement = bidirectional(v_shape(num_ranks))
    return deepest_first("vchimera", placement, num_ranks, num_microbatches, backward)
