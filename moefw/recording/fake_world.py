"""One rank of a world of any size, without other ranks and without memory: fake process groups, fake tensors.

Code that reads a tensor's values on the host fails here. So code that runs needs no such read on a device either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefw.recording.patches import meshes_with_values


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Act as ``rank`` of ``world`` ranks. Collectives do nothing; tensors made inside have shapes but no values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with meshes_with_values(), FakeTensorMode():
            yield
    finally:
        dist.destroy_process_group()
