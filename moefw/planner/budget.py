"""What a number of tokens costs: hours of GPUs, and their price. Imports no torch."""

from __future__ import annotations

from typing import Any, Final

from attrs import field, frozen
from attrs.validators import gt

from moefw.planner.data_files import Figure

SECONDS_OF_AN_HOUR: Final = 3600.0
HOURS_OF_A_DAY: Final = 24.0


@frozen(kw_only=True)
class Budget:
    """``tokens`` to train on, at ``tokens_per_s_per_gpu``, on ``gpus``. ``usd_per_gpu_hour``: None: unknown."""

    tokens: float = field(validator=gt(0.0))
    tokens_per_s_per_gpu: float = field(validator=gt(0.0))
    gpus: int = field(validator=gt(0))
    usd_per_gpu_hour: Figure | None

    @property
    def gpu_hours(self) -> float:
        """Hours of one GPU."""
        return self.tokens / self.tokens_per_s_per_gpu / SECONDS_OF_AN_HOUR

    @property
    def days(self) -> float:
        """Days that all GPUs take together, if nothing fails and nothing waits."""
        return self.gpu_hours / self.gpus / HOURS_OF_A_DAY

    @property
    def usd(self) -> float | None:
        """Price of the hours; None: unknown."""
        return None if self.usd_per_gpu_hour is None else self.gpu_hours * self.usd_per_gpu_hour.value

    def to_data(self) -> dict[str, Any]:
        """JSON of it."""
        return {
            "tokens": self.tokens,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "gpus": self.gpus,
            "gpu_hours": self.gpu_hours,
            "days": self.days,
            "usd_per_gpu_hour": None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour.value,
            "usd": self.usd,
        }

    def in_words(self) -> str:
        """Two lines: the hours, and the price with its source."""
        speed = f"{self.tokens:.4g} tokens at {self.tokens_per_s_per_gpu:,g} a second and GPU"
        gpus = f"{self.gpus:,} GPU{'' if self.gpus == 1 else 's'}"
        hours = f"{speed} take {_counted(self.gpu_hours)} GPU-hours: {_counted(self.days)} days of {gpus}"
        if self.usd is None or self.usd_per_gpu_hour is None:
            return f"{hours}\ntheir price is unknown: no cluster with a price was named"
        price = self.usd_per_gpu_hour
        origin = price.source or f"estimated: {price.estimated}"
        return f"{hours}\nthey cost {_counted(self.usd)} USD at {price.value:g} an hour ({origin})"


def _counted(value: float) -> str:
    """A number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
