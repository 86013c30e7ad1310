from moefw.testing import KindSuite

from moefw_sample import Sample


class TestSample(KindSuite):
    plugin = Sample
