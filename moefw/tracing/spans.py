"""Spans: what a rank did, from when to when. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from attrs import asdict, fields, frozen

from moefw.core.records import Action

Kind = Literal["step", "section", "pass", "phase", "wait", "movement", "gather", "reduction", "collective"]
COMPUTE: Final = ("step", "section", "pass", "phase", "wait")
"""Kinds of a rank's row of compute. A span of a later kind lies inside one of an earlier kind."""
WIRE: Final = ("movement", "gather", "reduction", "collective")
"""Kinds of a rank's row of the wire: from the launch until the data are there. They may overlap."""
TRANSFER: Final = "transfer"
"""Name of a wait for the tensors of another stage of the pipeline."""
HOST: Final = "host"
"""Name of a wait of the host for a value from its device."""


@frozen(kw_only=True)
class Span:
    """What a rank did between two times, in nanoseconds of its own clock.

    ``kind`` and ``name`` say what it is:

    - ``step``: a training step, without reading the batch.
    - ``section``: a part of it outside of passes, such as ``optimizer``, and parts of that, such as ``clip``.
    - ``pass``: a pass of a micro-batch through a stage or, in a pair, some phases of it in a row.
    - ``phase``: a phase of a layer in it (:class:`moefw.runtime.phases.Phase`), or ``weight gradients``.
    - ``wait``: what it waits for: a span of the wire by name, ``transfer`` or ``host``.
    - ``movement``: rows that travel to experts (``dispatch``) or back (``combine``), and their gradients.
    - ``gather``: parameters that FSDP gathers; ``reduction``: gradients that ranks sum up.
    - ``collective``: any other one, by its name.
    """

    kind: Kind
    name: str
    begin_ns: int
    end_ns: int
    step: int
    """Number of the step, from 1."""
    passing: Literal["F", "B", "I", "W"] | None = None
    """Kind of the pass: see :class:`moefw.core.records.Action`."""
    stage: int | None = None
    micro_batch: int | None = None
    beside: str | None = None
    """In a pair, the pass beside it, as ``<stage><kind><micro-batch>``."""
    layer: int | None = None
    nbytes: int | None = None
    """Bytes that this rank sends."""
    group: str | None = None
    """Name of the process group, the same on all of its ranks."""
    number: int | None = None
    """Number of the collective in its group, from the begin of the step. A wait has that of what it waits for."""

    @property
    def action(self) -> Action | None:
        """The pass it belongs to."""
        if self.passing is None or self.stage is None or self.micro_batch is None:
            return None
        return Action(self.passing, self.stage, self.micro_batch)

    @property
    def title(self) -> str:
        """Name with layer or pass, as a reader looks for it."""
        if self.kind == "pass" and self.action is not None:
            return f"{self.name} {self.action}"
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"

    def to_data(self) -> dict[str, Any]:
        """The span as a JSON object, without what it does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Span:
        """The span of a JSON object. Raises ValueError if it is none."""
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a span has no {sorted(unknown)[0]!r}")
        if data.get("kind") not in get_args(Kind):
            raise ValueError(f"{data.get('kind')!r} is no kind of span")
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(str(error)) from error
