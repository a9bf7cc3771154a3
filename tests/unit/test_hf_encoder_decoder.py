"""Models with an encoder and a decoder: any cut and schedule, at the prompt, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from hf_families import FAMILIES, batch_of, config_of, model_of, plain_step
from penstock.cli import main
from penstock.models import ParallelError
from penstock.models.huggingface import Decoder, DecoderError
from penstock.runtime.tensors.pytree import flatten
from penstock.train.settings import Settings
from penstock.train.tasks.huggingface import DecoderTask
from train_runs import losses, penstock

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


CUTS = {
    "a stage for each layer": ("1f1b", 1, [1] * 10),
    "the bridge begins a stage": ("zb-h1", 4, [4, 2, 2, 2]),
    "the bridge ends a stage": ("1f1b", 3, [5, 3, 2]),
    "the head alone": ("1f1b", 3, [2, 7, 1]),
    "two stages per rank": ("interleaved-1f1b", 2, [3, 2, 3, 2]),
}


@pytest.mark.parametrize("what", CUTS)
def test_any_cut_learns_what_the_whole_model_does(what: str) -> None:
    schedule, ranks, cut = CUTS[what]
    model, batch = model_of("t5"), batch_of("t5")
    decoder = Decoder(model, compare=False)
    cut = [*cut[:-1], cut[-1] + decoder.num_layers - sum(cut)]
    options: dict[str, Any] = {"num_stages": len(cut)} if schedule == "interleaved-1f1b" else {}
    ranks = len(cut) if not options else ranks
    pipe = ps.Pipeline(
        decoder.stages(len(cut), cut),
        ps.build(schedule, ranks, 2 if options else 3, **options),
        loss_fn=decoder.loss,
        parallel=ps.ParallelOptions(tied=decoder.tied),
    )
    result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    found = {key: parameter.grad.clone() for key, parameter in pipe.named_parameters() if parameter.grad is not None}
    whole = model_of("t5")
    loss, gradients = plain_step(whole, batch, 2 if options else 3, decoder.loss)
    assert torch.equal(torch.as_tensor(result.loss), loss)
    assert found
    assert [key for key, gradient in found.items() if not torch.equal(gradient, gradients[key])] == []


def test_a_stage_makes_nothing_else_of_the_model(tmp_path: Path) -> None:
    model = model_of("t5")
    model.save_pretrained(tmp_path)
    decoder = Decoder(tmp_path, compare=False)
    built = [stage() for stage in decoder.stages(4)]  # type: ignore[operator]
    names = [{name for name, _ in stage.named_parameters()} for stage in built]
    assert [one & other for one, other in itertools.combinations(names, 2) if one & other] == []
    assert all(sum(p.numel() for p in stage.parameters()) < 0.6 * decoder.model.num_parameters() for stage in built)
    assert all(each.device.type == "meta" for each in decoder.model.parameters())


def test_labels_are_shifted_as_the_model_does() -> None:
    """Marian begins with the token of its config, and M2M100 has no method of transformers for it."""
    labels = torch.tensor([[5, 6, -100], [7, 8, 9]])
    decoder = Decoder(config_of("marian"), compare=False)
    inputs, targets = decoder.inputs_and_targets({"input_ids": labels.abs(), "labels": labels})
    assert inputs["decoder_input_ids"].tolist() == [[2, 5, 6], [2, 7, 8]]
    assert targets is labels
    sizes = {key: value for key, value in FAMILIES["bart"].items() if key not in ("model_type", "architectures")}
    changes = {"decoder_start_token_id": 1, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    other = Decoder(
        transformers.M2M100Config(**{**sizes, **changes}),
        compare=False,
    )
    given, _ = other.inputs_and_targets({"input_ids": labels.abs(), "labels": labels})
    assert given["decoder_input_ids"].tolist() == [[1, 5, 6], [1, 7, 8]]


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(DecoderError, match=r"at random \(config\.decoder_layerdrop 0\.5\)"):
        Decoder(transformers.BartConfig(d_model=16, vocab_size=20, decoder_layerdrop=0.5))
    with pytest.raises(DecoderError, match=r"two lists of blocks, and 'encoder\.block' is one"):
        Decoder(config_of("t5"), blocks="encoder.block")
    decoder = Decoder(config_of("t5"), compare=False)
    layer = decoder.layers([0])[0]
    with pytest.raises(DecoderError, match=r"needs decoder_input_ids too, which decoder\.inputs_and_targets"):
        layer({"input_ids": torch.zeros(1, 3, dtype=torch.long)})
    with pytest.raises(ParallelError, match="with an encoder are not shared out"):
        decoder.stage([0]).shard_over(None)  # type: ignore[arg-type]
    nameless = transformers.T5Config(**{**FAMILIES["t5"], "decoder_start_token_id": None})
    with pytest.raises(DecoderError, match="does not shift labels for its decoder"):
        Decoder(nameless, compare=False).inputs_and_targets(batch_of("t5"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("t5")
    model_of("t5").save_pretrained(place / "model")
    (place / "pairs.py").write_text(PAIRS)
    (place / "text.txt").write_text("a rank runs its ops in order. " * 200)
    return place


PAIRS = """import torch
from torch.utils.data import Dataset

class Pairs(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        tokens = torch.randint(3, 290, (20,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens[:7]}
"""
OPTIONS = "--batch 8 --microbatches 4 --sample 0 --lr 0.01 --evaluate-every 0 --threads 1"


def test_ranks_that_would_share_a_stage_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"train --model {folder / 'model'} --data {folder / 'text.txt'} --out {folder / 'tp'} {OPTIONS} --tp 2"
    assert main(line.split()) == 2
    why = "--tp 2 divides layers, which Penstock knows for decoders, not for encoders and cross-attention"
    assert why in capfd.readouterr().err


def test_a_text_alone_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for data in ("", f"--data {folder / 'text.txt'}"):
        assert main(f"train --model {folder / 'model'} {data} --out {folder / 'text'} {OPTIONS}".split()) == 2
        assert "reads one text and writes another" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_stages_send_is_as_large_as_predicted(name: str, folder: Path, tmp_path: Path) -> None:
    """Of microbatches of two samples, between any two layers."""
    model_of(name).save_pretrained(tmp_path)
    count = Decoder(tmp_path, compare=False).num_layers
    settings = Settings(
        model=str(tmp_path),
        data=f"{folder / 'pairs.py'}:Pairs",
        ranks=count,
        schedule="1f1b",
        batch=4,
        microbatches=2,
        cut=(1,) * count,
    )
    schedule = settings.replica_schedule()
    task = DecoderTask(settings, schedule)
    value: Any = {key: each[:2] for key, each in task.read(None).batches[0].inputs.items()}
    sent = []
    for layer in task.decoder.layers():
        value = layer(value)
        sent.append(float(sum(leaf.nbytes for leaf in flatten(value)[0])))
    assert task.message_bytes(schedule)[:-1] == sent[:-1]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "schedule", ["zb-h1 --ranks 2", pytest.param("interleaved-1f1b --ranks 2", marks=pytest.mark.nightly)]
)
def test_a_run_goes_on_where_it_was_and_processes_change_nothing(schedule: str, folder: Path, tmp_path: Path) -> None:
    model = f"--model {folder / 'model'} --data {folder / 'pairs.py'}:Pairs {OPTIONS} --schedule {schedule}"
    assert main(f"train {model} --steps 4 --in-process --out {tmp_path / 'whole'}".split()) == 0
    assert main(f"train {model} --steps 2 --in-process --out {tmp_path / 'part'}".split()) == 0
    resumed = penstock(
        f"train --resume {tmp_path / 'part'} --steps 4".split(), loads=["transformers.models.t5.modeling_t5"]
    )
    assert resumed.code == 0, resumed.err
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_dropout_that_is_no_module_was_left_out_of_embeddings() -> None:
    """BART drops out embeddings by a function that asks whether the code around the blocks is in training."""
    model = model_of("bart")
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.5
    decoder = Decoder(model, compare=False)
    first = decoder.layers([0])[0]
    inputs, _ = decoder.inputs_and_targets(batch_of("bart"))
    share = (first(inputs)["hidden_states"] == 0).float().mean()
    assert 0.4 < share < 0.6
    first.eval()
    assert not (first(inputs)["hidden_states"] == 0).any()
