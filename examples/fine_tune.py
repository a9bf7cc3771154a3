"""Fine-tunes a tiny Llama from a folder over two pipeline ranks, and saves a folder that transformers opens.

    python examples/fine_tune.py            needs pip install ".[hf]" in a checkout

Give the folder of a model of your own in the place of `make_folder`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import penstock as ps
from penstock.models.huggingface import Decoder, inputs_and_targets

TEXT = "The pump lifts the water, and the water turns the wheel. " * 40


def make_folder(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        make_folder(before)
        model = AutoModelForCausalLM.from_pretrained(before)
        decoder = Decoder(model)
        pipe = ps.Pipeline(
            decoder.stages(2),
            ps.build("1f1b", num_ranks=2, num_microbatches=4),
            loss_fn=decoder.loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        )
        data = TEXT.encode()
        tokens = torch.tensor([list(data[at : at + 32]) for at in range(0, 512, 32)])
        batch = {"input_ids": tokens, "labels": tokens}
        for step in range(31):
            loss = pipe.step(*inputs_and_targets(batch)).loss
            if step % 10 == 0:
                print(f"step {step:2}  loss {loss:.3f}")
        model.save_pretrained(after)
        again = AutoModelForCausalLM.from_pretrained(after)
        with torch.no_grad():
            print("opened again, equal:", torch.equal(again(tokens).logits, model(tokens).logits))


if __name__ == "__main__":
    main()
