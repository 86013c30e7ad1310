"""The step of one rank, measured without a cluster: recorded on tensors without memory. Imports torch.

``measure`` builds the model of one rank. ``micro_batch`` runs forward and backward of the layers that ``layers``
chooses, three of each kind (``alike``), while a :class:`moefw.recording.recorder.Recorder` follows every storage.
``gathering`` takes the place of FSDP and allocates its buffers, ``operations`` notes products, other operators and
transfers; ``gradient_sums`` and ``optimizer_states`` add those that end a step. With pp, the stages of one position run
(``recorded_stage``), with nothing behind the way between them (``stages_without_peers``), and ``usage`` plays the
schedule with what each pass holds: micro-batches in flight are counted, not run. It also adds the layers that did not
run, and finds the peak.
"""
