"""A spec with every section, and the errors of other specs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.core.errors import MoefwError, SpecError
from moefw.core.site import Machine

REGISTRY = Registry()
DEFAULTS = defaults()

GOOD = """\
# every section, in the ways in which people write them
model:
  preset: qwen3-moe-tiny
  num_experts: 8
  num_layers: 2
routing: {use: topk, score: sigmoid, balance: [{kind: expert_bias, rate: 0.001}]}
gemm: {use: loop}
memory:
  - {use: recompute, regions: [attention, moe_act]}
  - use: keep
    regions: [layer]
parallel: {pp: 1, dense: {cp: 1}, experts: {ep: 2}}
data: {path: null}
train:
  steps: 20
  lr: 1e-3
  schedule: {use: wsd, decay_share: 0.5}
run: {dir: "runs/good", seed: 3}
"""


def assembled(text: str | bytes, *overrides: str) -> Assembly:
    """Return the assembly of a ``spec.yaml`` with that text and the overrides."""
    Path("spec.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return assemble(Path("spec.yaml"), overrides, defaults=DEFAULTS, registry=REGISTRY, machine=Machine(), for_run=True)


def complaints(text: str | bytes, *overrides: str, kind: type[MoefwError] = SpecError) -> list[str]:
    """Return the errors of such a spec, as they are printed."""
    with pytest.raises(MoefwError) as caught:
        assembled(text, *overrides)
    assert type(caught.value) is kind
    return [str(problem) for problem in caught.value.problems]


def complaint(text: str | bytes, *overrides: str, kind: type[MoefwError] = SpecError) -> str:
    (only,) = complaints(text, *overrides, kind=kind)
    return only
