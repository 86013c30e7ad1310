"""FlexAttention is asked for the same attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as library

from dense_attention import AttentionCase
from moefw.runtime.attention import flex
from moefw.runtime.attention.attend import attend
from moefw.runtime.attention.mask import Mask

Case = AttentionCase
CASES = {
    "plain": Case(),
    "all": Case(documents=True, keys=12, queries=12, window=4, sinks=True, value_width=16, scale=0.3),
    "last queries": Case(queries=3, keys=12, documents=True, heads=3, groups=1),
    "blocks": Case(batch=1, queries=300, keys=300, window=20, documents=True, sinks=True, width=4, value_width=4),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_its_output_is_that_of_the_other_kernels(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    tensors, mask = case.drawn()
    q, k, v, *sinks = (x.detach() for x in tensors)
    given = {"sinks_H": sinks[0] if sinks else None, "scale": case.scale}
    for found, right in zip(flex.attend(q, k, v, mask, **given), attend(q, k, v, mask, **given), strict=True):
        assert found.dtype is right.dtype
        torch.testing.assert_close(found, right, rtol=0, atol=2e-6)


@cases
def test_its_mask_is_the_dense_one(case: Case) -> None:
    _, mask = case.drawn()
    made = library.create_mask(
        flex.mask_function(mask, case.queries, case.keys), case.batch, 1, case.queries, case.keys, "cpu"
    )
    assert torch.equal(made, mask.visible(case.queries, case.keys, torch.device("cpu")).expand_as(made))


def test_blocks_that_no_query_sees_are_skipped() -> None:
    (q, k, *_), _ = CASES["blocks"].drawn()
    blocks = flex.block_mask(Mask(window=20), q, k).to_dense()
    assert torch.equal(blocks, torch.tensor([[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]], dtype=blocks.dtype))
