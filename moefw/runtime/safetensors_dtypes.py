"""The dtypes of tensors in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a file."""
NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}
"""The names by dtype."""
