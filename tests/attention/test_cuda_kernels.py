"""On a GPU, each input goes to a kernel that takes it, in the form that it takes."""

from __future__ import annotations

import pytest
import torch
from test_attend import CASES, agree, results

from cuda_attention import CudaAttention
from dense_attention import AttentionCase
from moefw.runtime.attention import kernels

Case = AttentionCase
FLASH = ["flash_attention", "flash_attention_backward"]
EFFICIENT = ["efficient_attention", "efficient_attention_backward"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaAttention:
    operators = CudaAttention()
    monkeypatch.setattr(kernels, "aten", operators)
    monkeypatch.setitem(kernels.KERNELS, "cpu", kernels.KERNELS["cuda"])
    return operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_the_same(cuda: CudaAttention, case: Case, dtype: torch.dtype) -> None:
    found, right = results(case, dtype)
    agree(found, right, 2e-6 if dtype is torch.float32 else 2**-7)
    agree(found[1:2], right[1:2], 1e-5)


@pytest.mark.parametrize(
    ("case", "dtype", "kernel"),
    [
        (Case(), torch.bfloat16, FLASH),
        (Case(groups=1, sinks=True, width=20, value_width=12), torch.float16, FLASH),
        (Case(width=256, value_width=256), torch.bfloat16, FLASH),
        (Case(width=257), torch.bfloat16, EFFICIENT),
        (Case(), torch.float32, EFFICIENT),
        (Case(window=3), torch.bfloat16, EFFICIENT),
        (Case(documents=True), torch.bfloat16, EFFICIENT),
        (Case(queries=2), torch.bfloat16, EFFICIENT),
        (Case(batch=0), torch.bfloat16, []),
    ],
    ids=str,
)
def test_each_input_has_its_kernel(cuda: CudaAttention, case: Case, dtype: torch.dtype, kernel: list[str]) -> None:
    results(case, dtype)
    assert cuda.called == kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pytorch_takes_the_calls(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: torch.dtype) -> None:
    """On tensors without memory: the signatures and shapes of the installed version."""
    monkeypatch.setitem(kernels.KERNELS, "meta", kernels.KERNELS["cuda"])
    tensors, mask = case.drawn(dtype)
    q, k, v = (x.detach().to("meta") for x in tensors[:3])
    plain = mask.is_plain(case.queries, case.keys)
    visible = None if plain else mask.visible(case.queries, case.keys, torch.device("cpu")).to("meta")
    scores = kernels.Scores(1.0, causal=plain, visible_BHSS=visible)
    out, lse = kernels.forward(q, k, v, scores)
    grads = kernels.backward(torch.empty_like(out), q, k, v, out, lse, scores)
    assert (out.shape, lse.shape) == ((*q.shape[:-1], case.value_width), q.shape[:-1])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_switches_for_a_fixed_order_are_as_they_were_behind_a_backward(cuda: CudaAttention) -> None:
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    results(Case(), torch.bfloat16)
    after = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert cuda.called == FLASH
    assert after == before
