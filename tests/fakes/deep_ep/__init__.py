"""A ``deep_ep`` that moves rows over gloo: the library's semantics, its assertions and its signatures, on a CPU."""

import torch

from deep_ep.elastic import ElasticBuffer, EPHandle
from deep_ep.hybrid import HybridEPBuffer
from deep_ep.legacy import Buffer, Config
from deep_ep.streams import EventHandle, EventOverlap

topk_idx_t = torch.int64

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "topk_idx_t",
]
