"""Whether the folders that a spec names have the weights and adapters of its model, found without memory for them."""

from __future__ import annotations

from pathlib import Path

from moefw.compose.adapter_weights import compared_adapter
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import CheckpointError, MoefwError, PlanError, PluginError, SpecError
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.loading import placed
from moefw.training.new_run import on_meta
from moefw.training.what_trains import freeze_problems


def compare_weights(assembly: Assembly) -> str:
    """Compare the model with the folder of its weights, and that of its adapters. Return why that is not known, or "".

    Raises SpecError with every tensor that a folder lacks, or has in another shape, and every pattern of
    ``train.freeze`` that names nothing, as training does. Adapters are compared where the weights
    are those of the model.
    """
    train = assembly.spec.train
    alone = {**assembly.resolved(), "parallel": {}, "pipeline": {}}
    try:
        one_rank = assemble_tree(alone, Marks("check"), defaults=defaults(), world=1, trains=False)
        model = on_meta(one_rank)
    except (SpecError, CheckpointError, PluginError):
        raise
    except (MoefwError, RuntimeError) as error:  # a part needs what this machine lacks
        return str(error)
    problems = freeze_problems(model, one_rank.frozen, None)
    path = Path(train.weights or "")
    try:
        rules = family_of(read_config(path), path).rules
        placed(model, Folder(path), rules, num_experts=one_rank.site.dims.num_experts)
        compared_adapter(model, one_rank, None)
    except (SpecError, CheckpointError, PlanError) as error:
        problems += error.problems
    if problems:
        raise SpecError(problems)
    return ""
