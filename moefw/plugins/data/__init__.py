"""Data sources, and the files and tokenizers that they share.

Text becomes ids once. ``source`` fills a hidden folder of the cache and then renames it (``prepared``), so no reader
sees half of it; the leftovers of a killed process are recognised by their lock (:mod:`moefw.system.folders`). Every
file is hashed in chunks of 256 KiB, and a chunk is checked when it is first read (``hashed``). So a start does not hash
a gigabyte, and a run never trains on a flipped bit. Files of others that are read in place are hashed at their first
read, and compared at every later one (``megatron``).

A ``tokenizer.json`` is untrusted data, and the library that reads it may panic, abort, or take all memory. It runs in
its own process within limits (``encoding``), which encodes on all cores, and decodes. Text is split between cores at
word ends if the tokenizer splits it as GPT-2's does, because no id changes there (``corpus_ids``).

Conversations (``chat``) are rendered by a template, a program of somebody else, in a process like that of a tokenizer.
It also tells which characters are answers, and so which tokens train (``trained`` of a stream).

A blend (``blend``) puts the streams of its parts end to end, and an order that is a function of the number of a
sequence says from which part it is (:mod:`moefw.training.data.blend_order`). Ids of any source are checked against the
vocabulary where windows become batches (:mod:`moefw.runtime.windows`).
"""
