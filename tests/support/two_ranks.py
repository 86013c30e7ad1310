"""pytest plugin, where it is not the suite that is tested: worlds of one rank and two, and no check that repeats another.

The memory suite trains the model under each region once for "no bit changes", and once more for each check left out.
"""

import pytest
from attrs import evolve

from moefw.testing import profiles

LEFT_OUT = (
    "test_two_micro_batches_in_flight_change_no_bit",
    "test_auxiliary_losses_arrive_once",
)
profiles.PROFILES = {**profiles.PROFILES, "quick": evolve(profiles.PROFILES["quick"], worlds=(1, 2))}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.name in LEFT_OUT])
    items[:] = [item for item in items if item.name not in LEFT_OUT]
