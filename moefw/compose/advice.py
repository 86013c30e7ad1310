"""Fixes that depend on all parts of a spec: where an option is, and what a name chooses. Asked only for errors."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final, Union, get_args, get_origin

import attrs

from moefw.compose.registry import Registry
from moefw.compose.spec.hints import flow
from moefw.compose.spec.sections import RESERVED, Spec
from moefw.compose.spec.source import KeyPath, Tree, dotted
from moefw.compose.spec.structure import NoChoice, UnknownKey
from moefw.core.choice import PluginChoice
from moefw.core.errors import PluginError, Problem, closest
from moefw.core.kinds import KINDS
from moefw.core.plugin import Plugin

MOST_PLACES: Final = 3
"""The most options of one name that an error lists."""
LIKELY: Final = 0.8
"""Least similarity of a misspelt key to an option elsewhere."""

OTHER_NAMES: Final[Mapping[str, str]] = {
    "train.lr": "learning_rate max_lr",
    "train.steps": "max_steps train_iters num_train_steps",
    "train.seq_len": "seq_length max_seq_len max_seq_length sequence_length",
    "train.micro_batch": "batch_size micro_batch_size local_batch_size per_device_train_batch_size",
    "train.tokens_per_step": "global_batch_size train_batch_size",
    "train.clip_norm": "clip_grad max_grad_norm max_norm gradient_clipping",
    "train.checkpoint_every": "save_interval save_steps",
    "train.eval_every": "eval_interval eval_steps",
    "train.schedule.warmup_steps": "lr_warmup_iters lr_warmup_steps warmup_iters",
    "train.optimizer.beta1": "adam_beta1",
    "train.optimizer.beta2": "adam_beta2",
    "model.dim": "hidden_size d_model",
    "model.num_layers": "num_hidden_layers n_layers",
    "model.expert_dim": "moe_ffn_hidden_size moe_intermediate_size",
    "model.num_experts": "num_local_experts n_routed_experts",
    "model.top_k": "num_experts_per_tok moe_router_topk",
    "model.init_std": "initializer_range init_method_std",
    "attention.num_heads": "num_attention_heads n_heads",
    "attention.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_degree pp_size",
    "parallel.dense.tp": "tensor_model_parallel_size tensor_parallel_degree tp_size",
    "parallel.dense.cp": "context_parallel_size context_parallel_degree cp_size",
    "parallel.experts.ep": "expert_model_parallel_size expert_parallel_degree ep_size",
    "parallel.experts.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "routing.balance": "moe_aux_loss_coeff router_aux_loss_coef",
    "data.path": "data_path train_data_path dataset_path",
    "run.dir": "output_dir save_dir dump_folder",
}
"""Names of options in Megatron-LM, torchtitan, Hugging Face and DeepSpeed, by the option here."""


def advised(
    problem: Problem, registry: Registry, declarations: Mapping[KeyPath, type[Plugin]], defaults: Tree
) -> Problem:
    """``problem`` with a fix that knows all parts. ``declarations``: of the plugins that the spec chooses, by path."""
    if not isinstance(problem, UnknownKey | NoChoice):
        return problem
    options = _options(Spec, (), {**dict(_by_default(registry, defaults)), **declarations})
    fix = problem.fix
    if isinstance(problem, UnknownKey):
        places = list(_places(problem, [path for path, _ in options]))[:MOST_PLACES]
        if places:
            fix = f"Did you mean {' or '.join(map(_named, places))}?"
    if isinstance(problem, NoChoice):
        kind = next(kind for path, kind in options if kind and path in (problem.path, problem.path[:-1]))
        default = _default_choice(problem.path, defaults)
        choice = _choice(kind, problem.name, registry, default) or default
        if choice:
            fix = f"Write {'' if problem.name in choice.values() else 'for example '}{flow(choice)}."
    return Problem(problem.what, fix, problem.where)


def _named(place: KeyPath) -> str:
    """Path of an option in quotes. The name of a section alone could be read as that of an option."""
    return f"{'the section ' if len(place) == 1 else ''}{dotted(place)!r}"


def _by_default(registry: Registry, defaults: Tree) -> Iterator[tuple[KeyPath, type[Plugin]]]:
    """Yield the path and declaration of each plugin that the defaults choose, for choices that cannot be read."""
    for kind in KINDS.values():
        path = tuple(kind.section.split("."))
        default = _default_choice(path, defaults)
        if default:
            yield path, registry.get(kind.name, default["use"]).declaration


def _options(
    cls: Any, path: KeyPath, declarations: Mapping[KeyPath, type[Plugin]]
) -> Iterator[tuple[KeyPath, str | None]]:
    """Yield the path of every option below ``path``, and the kind of plugin that it chooses, if it does."""
    for field in attrs.fields(attrs.resolve_types(cls)):
        if not field.init:
            continue
        here = (*path, field.name)
        kind = field.metadata.get("kind")
        yield here, kind
        if kind:
            for chosen, declaration in declarations.items():
                if here in (chosen, chosen[:-1]):
                    yield from _options(declaration, chosen, declarations)
        else:
            union = get_origin(field.type) in (Union, types.UnionType)
            for section in get_args(field.type) if union else (field.type,):
                if attrs.has(section) and section is not PluginChoice:
                    yield from _options(section, here, declarations)


def _places(unknown: UnknownKey, options: list[KeyPath]) -> Iterator[KeyPath]:
    """Yield the options that a key means which is none where it stands; none if it misspells one there."""
    key = str(unknown.path[-1])
    by_name: dict[str, list[KeyPath]] = {}
    for path in options:
        if path[-1] not in RESERVED:
            by_name.setdefault(str(path[-1]), []).append(path)
    if key in by_name:
        yield from by_name[key]
        return
    spelled = key.lower().replace("-", "_")
    known = [path for path in options if spelled in OTHER_NAMES.get(dotted(path), "").split()]
    if known:
        yield from known
        return
    here = [unknown.meant] if unknown.meant else []
    for name in difflib.get_close_matches(key, [*here, *by_name], n=1, cutoff=LIKELY):
        if name != unknown.meant:
            yield from by_name[name]


def _default_choice(path: KeyPath, tree: Any) -> dict[str, Any]:
    """What the defaults choose at ``path``; empty if they choose nothing there."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return {"use": tree["use"]} if isinstance(tree, Mapping) and "use" in tree else {}


def _choice(kind: str, name: str, registry: Registry, default: Mapping[str, Any]) -> dict[str, Any]:
    """Choice that a name stands for, or a name like it: of a plugin, or of a preset of the default one."""
    presets: Mapping[str, Any] = registry.get(kind, default["use"]).declaration.presets() if default else {}
    likely = closest(name, [*registry.names_of(kind), *presets])
    for candidate in (name, *([likely] if likely else [])):
        if candidate in presets:
            return {"preset": candidate}
        if _is_plugin(kind, candidate, registry):
            return {"use": candidate}
    return {}


def _is_plugin(kind: str, name: str, registry: Registry) -> bool:
    try:
        return registry.get(kind, name).name == name
    except PluginError:
        return False
