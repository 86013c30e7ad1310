"""Prediction of the cost of a spec, without a cluster: memory, work, and in ``time`` how long a step takes.

``plans`` looks into the cache, and otherwise ``measure`` builds the model of one rank on tensors without memory.
``micro_batch`` runs forward and backward of the layers that ``layers`` chooses, three of each kind, while a
:class:`moefw.recording.recorder.Recorder` follows every storage. ``gathering`` takes the place of FSDP and allocates
its buffers, ``operations`` notes products, other operators and transfers; ``gradient_sums`` and ``optimizer_states``
add those that end a step. With pp, the stages of one position run, with nothing behind the way between them
(``stages_without_peers``), and ``usage`` plays the schedule with what each pass holds: micro-batches in flight are
counted, not run. It also adds the layers that did not run, and finds the peak.
"""

from moefw.planner.plans import ledger
from moefw.planner.report import COLUMNS, Ledger, RegionTotals

__all__ = ["COLUMNS", "Ledger", "RegionTotals", "ledger"]
