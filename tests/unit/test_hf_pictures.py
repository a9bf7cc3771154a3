"""Models that see: pictures at the prompt, to the bit what the whole model learns, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import penstock as ps
from hf_families import FAMILIES, model_of
from penstock.cli import main
from penstock.models.huggingface import Decoder, DecoderError, NextTokenLoss
from penstock.models.huggingface.pictures import PictureForm, picture_form
from penstock.train.settings import Settings
from penstock.train.tasks.huggingface import DecoderTask
from tiers import others_nightly
from train_runs import losses

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

FORM = PictureForm(3, 8, 4, 299)


def test_pictures_and_tokens_that_do_not_go_together_are_refused() -> None:
    decoder = Decoder(model_of("llava"), compare=False)
    assert decoder.pictures == FORM == picture_form(model_of("llava"))
    (first,) = decoder.layers([0])
    tokens = torch.tensor([[5, 299, 299, 299, 299, 6]])
    picture = torch.zeros(1, 3, 8, 8)
    value = first({"input_ids": tokens, "pixel_values": picture})
    assert value["hidden_states"].shape == (1, 6, 16), "of tokens"
    assert "pixel_values" not in value
    with pytest.raises(DecoderError, match=r"hold 4 image tokens \(number 299\), and there are no pixel_values"):
        first({"input_ids": tokens})
    with pytest.raises(DecoderError, match=r"pixel_values are torch\.uint8; give the pictures as"):
        first({"input_ids": tokens, "pixel_values": picture.to(torch.uint8)})


@pytest.mark.parametrize("name", ["llava", "paligemma"])
def test_the_model_itself_refuses_pictures_that_its_tokens_do_not_name(name: str) -> None:
    decoder = Decoder(model_of(name), compare=False)
    form, (first,) = decoder.pictures, decoder.layers([0])
    assert form is not None
    tokens = torch.tensor([[5, *[form.token] * form.num_tokens, 6]])
    picture = torch.zeros(1, form.num_channels, form.size, form.size)
    first({"input_ids": tokens, "pixel_values": picture})
    wrong = [(tokens, picture.repeat(2, 1, 1, 1)), (tokens[:, :1], picture), (tokens, picture.movedim(1, 3))]
    wrong.append((tokens, picture.repeat(1, 1, 2, 2)))
    for words, pictures in wrong:
        with pytest.raises((ValueError, RuntimeError)):
            first({"input_ids": words, "pixel_values": pictures})


def test_pictures_of_any_size_are_refused() -> None:
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes = {key: value for key, value in FAMILIES["llava"]["text_config"].items() if key != "model_type"}
    config = transformers.Mistral3Config(
        vision_config={"model_type": "pixtral", **vision, "head_dim": 4, "image_size": 8, "patch_size": 4},
        text_config={"model_type": "mistral", **sizes},
        image_token_index=299,
        architectures=["Mistral3ForConditionalGeneration"],
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    assert picture_form(model) is None, "its tower asks for image_sizes too"
    first = Decoder(model).layers([0])[0]
    tokens = torch.tensor([[5, 6]])
    assert first({"input_ids": tokens})["hidden_states"].shape == (1, 2, 16), "text is compared, and trains"
    with pytest.raises(DecoderError, match="or pictures of no one size; it was compared"):
        first({"input_ids": tokens, "pixel_values": torch.zeros(1, 3, 8, 8)})


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(["llava", "paligemma"], ["paligemma"]))
def test_at_the_prompt_with_pictures(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model_of(name).save_pretrained(tmp_path / "model")
    (tmp_path / "pictures.py").write_text(PICTURES.format(token=FAMILIES[name]["image_token_index"]))
    options = "--batch 8 --microbatches 4 --steps 4 --lr 0.01 --evaluate-every 0 --threads 1 --in-process --json"
    options += f" --data {tmp_path / 'pictures.py'}:Pictures"
    line = f"train --model {tmp_path / 'model'} --schedule zb-h1 --out {tmp_path / 'run'} {options}"
    assert main(line.split()) == 0
    capfd.readouterr()
    first, *_, last = losses(tmp_path / "run")
    assert last < first
    settings = Settings.from_mapping(json.loads((tmp_path / "run/settings.json").read_text()))
    task = DecoderTask(settings, settings.replica_schedule())
    example = task.read(None).batches[0]
    schedule = ps.build("zb-h1", 4, 4)
    pipe = ps.Pipeline(
        task.stages(), schedule, loss_fn=task.loss, parallel=ps.ParallelOptions(tied=task.tied), seed=settings.seed
    )
    result = pipe.step(example.inputs, example.targets, update=False)
    assert result.loss == first
    model, plain, total = model_of(name), NextTokenLoss(), torch.zeros(())
    weights = [plain.weight(targets) for targets in example.targets.chunk(4)]
    for number, weight in enumerate(weights):
        part = {key: value.chunk(4)[number] for key, value in example.inputs.items()}
        loss = plain(model(**part, use_cache=False).logits, example.targets.chunk(4)[number])
        (loss * (weight / sum(weights))).backward()
        total = total + loss.detach() * (weight / sum(weights))
    assert torch.equal(torch.as_tensor(result.loss), total)
    whole = {key: parameter.grad for key, parameter in model.named_parameters()}
    looked = [key for key, grad in whole.items() if "vision_tower" in key and grad is not None and grad.any()]
    assert looked, "the tower learns"
    found = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    for key, gradient in found.items():
        wanted = whole[key]
        if gradient is None or wanted is None:
            assert not any(each.any() for each in (gradient, wanted) if each is not None), key
        else:
            assert torch.equal(gradient, wanted), key


PICTURES = """import torch
from torch.utils.data import Dataset

class Pictures(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(number % 4)
        tokens = torch.randint(3, 290, (9,), generator=draw)
        tokens[1:5] = {token}
        labels = tokens.masked_fill(tokens == {token}, -100)
        return {{"input_ids": tokens, "labels": labels, "pixel_values": torch.randn(3, 8, 8, generator=draw)}}
"""


def test_ranks_do_not_share_the_first_layer_of_a_model_that_sees(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model_of("llava").save_pretrained(tmp_path / "model")
    line = f"train --model {tmp_path / 'model'} --schedule mllm --ranks 2 --out {tmp_path / 'run'} --in-process"
    assert main(line.split()) == 2
    assert "mllm has stages that several ranks share, which must be the embedding of words" in capfd.readouterr().err
