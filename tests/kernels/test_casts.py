"""Rounding to bf16 in integers is PyTorch's, as the instruction of a GPU is; for FP8, see ``test_quantize_kernels.py``."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import torch


def rounds_as_torch() -> None:
    from rounding_kernel import rounded

    upper = torch.arange(2**16).unsqueeze(1) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x_N = (upper + lower).flatten().int().view(torch.float32)
    found_N, wanted_N = rounded(x_N), x_N.bfloat16().float()
    assert torch.equal(found_N.isnan(), wanted_N.isnan())
    numbers = ~wanted_N.isnan()
    assert torch.equal(found_N.view(torch.int32)[numbers], wanted_N.view(torch.int32)[numbers])


def test_all_bf16_numbers_and_what_lies_about_the_middle_above_them_round_as_in_torch(
    interpreter: ProcessPoolExecutor,
) -> None:
    interpreter.submit(rounds_as_torch).result()
