"""What is trained: models as flat lists of layers, their losses, their costs."""

from penstock.models.bert import (
    BERTConfig,
    BERTLoss,
    bert_costs,
    bert_layers,
    bert_presets,
    bert_stage,
    bert_tied_parameters,
)
from penstock.models.clip import (
    CLIP,
    CLIPConfig,
    CLIPStages,
    Contrast,
    ContrastiveLoss,
    TowerConfig,
    clip_presets,
    clip_program,
    retrieval_accuracy,
    tower_costs,
    tower_layers,
    tower_stage,
)
from penstock.models.costs import (
    decoder_costs_by_length,
    gpt_costs,
    gpt_costs_by_length,
)
from penstock.models.gpt import GPTConfig, build_layers, gpt_stage, presets, tied_parameters
from penstock.models.loss import CrossEntropy
from penstock.models.parallel import ParallelError, parallelize, require_parallel
from penstock.models.sampling import sample

__all__ = [
    "BERTConfig",
    "BERTLoss",
    "CLIP",
    "CLIPConfig",
    "CLIPStages",
    "Contrast",
    "ContrastiveLoss",
    "CrossEntropy",
    "GPTConfig",
    "ParallelError",
    "TowerConfig",
    "bert_costs",
    "bert_layers",
    "bert_presets",
    "bert_stage",
    "bert_tied_parameters",
    "build_layers",
    "decoder_costs_by_length",
    "clip_presets",
    "clip_program",
    "gpt_costs",
    "gpt_costs_by_length",
    "gpt_stage",
    "parallelize",
    "presets",
    "require_parallel",
    "retrieval_accuracy",
    "sample",
    "tied_parameters",
    "tower_costs",
    "tower_layers",
    "tower_stage",
]
