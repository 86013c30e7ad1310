"""Code that runs in a step: the MoE layer, communication, compute, memory and parallel layouts.

A layer (``layer``) is a tuple of phases, cut where rows start to travel and where they have arrived. A phase is a
function of one frozen pytree, whose tensors are all that it gets from the phase before. A model's forward runs them in
order. A scheduler may run them apart (``phases``): each call of a phase then has a graph and a backward of its own,
several micro-batches may be in flight, and no bit of the result changes.

What is not passed as an argument is in two context variables: ``forward_context`` and ``accounting``.

The host runs ahead of a GPU: from the router to combine it reads at most once, what ranks tell each other, and nothing
on a rank that is alone or under a budget with ``max_tokens``. :mod:`moefw_kernels.devices` alone asks for the type of a
device, and ``tests/dispatch/test_host_reads.py`` has the table of reads. A part that needs counts on the host says so,
and costs a read.
"""
