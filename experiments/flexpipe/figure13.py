"""Figure 13: GPT 16.1B with vocabularies from 256K to 1.2M words on 32 GPUs, every method at its best.

    python -m experiments.flexpipe.figure13               simulated, seven minutes
    python -m experiments.flexpipe.figure13 --measured    what it found at 512K and 1M on emulated devices, 2 minutes
    python -m experiments.flexpipe.figure13 --show        what was found last

The paper gives FlexPipe's speedups: 1.31 to 2.28 over Megatron-LM, which is out of memory from 1M on, 1.27 to 1.31
over T-1F1B, 1.24 to 1.49 over Tessel, which is out of memory at 1.2M.
"""

from __future__ import annotations

from experiments.flexpipe.setups import GPT_16B
from experiments.flexpipe.sweep import command

PAPER = {"Megatron-LM": "1.31-2.28, X from 1M on", "T-1F1B": "1.27-1.31", "Tessel": "1.24-1.49, X at 1.2M"}

if __name__ == "__main__":
    command("figure13", __doc__, GPT_16B, PAPER, headline=(512, 1000))
