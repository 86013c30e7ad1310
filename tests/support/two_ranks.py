"""pytest plugin: suites look at worlds of one rank and two, where it is not the suite that is tested."""

from attrs import evolve

from moefw.testing.suites import base

base.PROFILES = {"quick": evolve(base.PROFILES["quick"], worlds=(1, 2))}
