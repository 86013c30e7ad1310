from moefw.testing import MemorySuite

from moefw_sample import Sample


class TestSample(MemorySuite):
    plugin = Sample
    options = {"regions": ["experts"]}
