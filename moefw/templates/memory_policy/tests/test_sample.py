from moefw.testing import MemoryPolicySuite

from moefw_sample import Sample


class TestSample(MemoryPolicySuite):
    plugin = Sample
    options = {"regions": ["experts"]}
