"""Parallel layouts: mesh arithmetic, opened process groups, sharded parameters, sums of gradients.

``meshes`` is the arithmetic of a layout and ``opened_layout`` its process groups. ``holders`` says who holds, shares
and writes each parameter. Attention, MLPs, embedding and head are split over tp (``tensor_parallel``): each gathers the
tokens of its ranks and returns to each rank its part, so the layers between them, MoE layers included, see every token
once. Ranks of cp share sequences: the first phase cuts the batch (``sequence_cut``), and a pack of documents may be
shared by fewer of them (``cp_blocks``).
"""
