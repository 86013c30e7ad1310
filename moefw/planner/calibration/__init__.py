"""Measurement of this machine, for a file of its cluster.

``readings`` repeats a measurement and says how much two halves of the repeats differ; ``clocks`` times a device and the
host; ``alone`` has what a rank measures without others, ``links`` what ranks measure together; ``ranks`` lets all ranks
measure at once and agrees on the result; ``result`` makes a cluster of it.
"""
