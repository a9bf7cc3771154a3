"""Peak resident memory of each of 4 processes that build and train their own stage of a folder, above importing.

    python benchmarks/hf_families/run.py [BLOCKS]

A Llama of so many blocks (10, or 289 MB, unless told otherwise) with random weights is saved to a temporary folder.
Each stage is built in a process of its own, which prints, as shares of the checkpoint: its resident memory after
importing, and above that the peak after the comparison on a small copy, after its stage is loaded, and after the
forward and backward of a microbatch, in which every gradient is made; and its own weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_RANKS = 4
SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "intermediate_size": 2048,
    "vocab_size": 1000,
}

BUILD = """
import json, resource, sys, torch
import transformers, transformers.models.llama.modeling_llama
from penstock.models.huggingface import Decoder
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
torch.ones(2) @ torch.ones(2)
start = resident()
open("/proc/self/clear_refs", "w").write("5")
decoder = Decoder(sys.argv[1])
compared = peak() - start
stage = decoder.stages(int(sys.argv[3]))[int(sys.argv[2])]()
loaded = peak() - start
own = sum(parameter.numel() * 4 for parameter in stage.parameters())
hidden = torch.randn(1, 32, decoder.config.hidden_size, requires_grad=True)
out = stage(torch.arange(32)[None] if sys.argv[2] == "0" else {"hidden_states": hidden})
(out if isinstance(out, torch.Tensor) else out["hidden_states"]).sum().backward()
assert all(parameter.grad is not None for parameter in stage.parameters())
found = {"import": start, "compared": compared, "loaded": loaded, "trained": peak() - start, "own": own}
print(json.dumps(found))
"""


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": blocks})).save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        for rank in range(NUM_RANKS):
            command = [sys.executable, "-c", BUILD, folder, str(rank), str(NUM_RANKS)]
            out = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(out.stdout.splitlines()[-1])
            print(rank, size, {name: round(value / size, 3) for name, value in row.items()}, flush=True)


if __name__ == "__main__":
    main()
