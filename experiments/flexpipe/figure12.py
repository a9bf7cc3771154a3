"""Figure 12: GPT 5B with vocabularies from 64K to 1M words on 32 GPUs, every method at its best.

    python -m experiments.flexpipe.figure12               simulated, ten minutes
    python -m experiments.flexpipe.figure12 --measured    what it found at 1M on emulated devices, a minute
    python -m experiments.flexpipe.figure12 --show        what was found last

The paper gives FlexPipe's speedups: 1.14 to 1.91 over Megatron-LM, 1.20 to 1.28 over T-1F1B, 1.13 to 1.30 over
Tessel.
"""

from __future__ import annotations

from experiments.flexpipe.setups import GPT_5B
from experiments.flexpipe.sweep import command

PAPER = {"Megatron-LM": "1.14-1.91", "T-1F1B": "1.20-1.28", "Tessel": "1.13-1.30"}

if __name__ == "__main__":
    command("figure12", __doc__, GPT_5B, PAPER, headline=(1000,))
