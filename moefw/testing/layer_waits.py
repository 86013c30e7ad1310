"""The waits of the host in one MoE layer, from the router to combine, counted on a device that any machine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.testing.host_waits import HostWaits, Wait
from moefw.testing.layer_case import LayerCase, build_layer, this_rank


@frozen
class LayerWaits:
    """The waits of one rank: reads and uploads in forward, both in backward, and the layer's output on the CPU."""

    reads: Sequence[Wait]
    uploads: Sequence[Wait]
    backward: Sequence[Wait]
    out_TD: Tensor


def layer_waits(layer_case: LayerCase) -> LayerWaits:
    """Run the layer of a layer case forward and backward on this rank, and return the waits of the host.

    Registers a device for the rest of the process: run it on a pool of its own. In bf16 only are grouped products those
    of a GPU. Raises ContractError where PyTorch has no devices that are written in Python.
    """
    layer, shared = build_layer(layer_case)
    rank = this_rank()
    with HostWaits() as waits:
        waits.move(layer)
        x_TD, probe_TD = waits.on_device(layer_case.draw(rank))
        x_TD.requires_grad_()
        with shared_by_micro_batches(layer.parameters()):
            out_TD, _ = layer(x_TD, waits.on_device(layer_case.batch(rank)))
            reads = tuple(waits.reads)
            uploads = tuple(waits.uploads)
            (out_TD * probe_TD).sum(dtype=torch.float32).backward()
        backward = (*waits.reads[len(reads) :], *waits.uploads[len(uploads) :])
    shared.close()
    return LayerWaits(reads, uploads, backward, waits.on_host(out_TD))
