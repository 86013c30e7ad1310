"""The largest moment of a step: forward and backward, call by call, as a sum that can be shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

from attrs import frozen

from moefw.ledger.parts import FP32, ModelMemory, RankShape, Weight
from moefw.planner.placement import Call, PlacedLayer, Rerun, Wait
from moefw.planner.static import unit_elements

ROOT = "root"
"""The unit of what is in no other: gathered from the first forward to the last backward."""


@frozen(kw_only=True)
class Peak:
    """A moment of a step, in bytes beside what is always held.

    ``gradients`` that are not there yet count as negative.
    """

    place: str
    saved: int
    gathered: int
    passing: int
    gradients: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.saved + self.gathered + self.passing + self.gradients


@final
class Sweep:
    """Goes through a micro-batch of a rank."""

    def __init__(
        self,
        model: ModelMemory,
        shape: RankShape,
        layers: Sequence[PlacedLayer],
        *,
        width_of: Callable[[int, str], int],
        all_gradients: bool,
    ) -> None:
        self.model, self.shape, self.layers, self.all_gradients = model, shape, layers, all_gradients
        self._width_of = width_of
        self._outside = unit_elements(model.weights)
        self._units = [unit_elements(layer.layer.weights) for layer in layers]
        self._weights_of = [layer.layer.weights for layer in layers]
        self._side = {weight.unit: weight.side for weight in self._weights()}
        self._root = self._gathered_root()
        self._below = [0]
        for layer in layers:
            self._below.append(self._below[-1] + layer.kept)
        self._out = sum(tensor.nbytes for tensor in model.saves)

    def peaks(self) -> Iterator[Peak]:
        """Yield every moment that may be the largest."""
        embed = self._gathering(0, "embed")
        yield self._peak("forward, gathering of the embedding", saved=0, gathered=self._root + embed, passing=0)
        for number, layer in enumerate(self.layers):
            yield from self._forward(number, layer)
        yield from self._around_the_loss()
        buffer = self._reduced(self._outside, "head")
        for number in reversed(range(len(self.layers))):
            yield from self._backward(number, self.layers[number], buffer)
            for call in reversed(self.layers[number].calls):
                buffer = self._reduced(self._units[number], call.unit) or buffer
        yield self._last(embed, buffer)

    def _last(self, gathering: int, buffer: int) -> Peak:
        last = self.model.last_peak_candidate
        done = self._all_elements() - self._outside.get("embed", 0) // self._shards("embed")
        if not gathering:
            return self._peak(last.name, saved=0, gathered=self._root, passing=last.passing, done=done)
        passing = buffer + 2 * self.model.stream_bytes
        return self._peak(last.name, saved=0, gathered=self._root + gathering, passing=passing, done=done)

    def _weights(self) -> Iterator[Weight]:
        yield from self.model.weights
        for layer in self.layers:
            yield from layer.layer.weights

    def _shards(self, unit: str) -> int:
        return self.shape.shards[self._side.get(unit, "dense")]

    def _gathered_root(self) -> int:
        if self._shards(ROOT) == 1:
            return 0
        return FP32 * (self._outside.get(ROOT, 0) + sum(units.get(ROOT, 0) for units in self._units))

    def _gathers(self, number: int, unit: str) -> int:
        """Return the bytes of a unit when it is gathered; 0 where it is not sharded."""
        if not unit or unit == ROOT or self._shards(unit) == 1:
            return 0
        units = self._outside if unit in ("head", "embed") else self._units[number]
        return units.get(unit, 0) * self._width_of(number, unit)

    def _gathering(self, number: int, unit: str) -> int:
        """Return the most that gathering a unit takes."""
        if not self._gathers(number, unit):
            return 0
        weights = self.model.weights if unit in ("head", "embed") else self._weights_of[number]
        elements = sum(weight.gathering(self._shards(unit)) for weight in weights if weight.unit == unit)
        return elements * self._width_of(number, unit)

    def _peak(self, place: str, *, saved: int, gathered: int, passing: int, done: int = 0) -> Peak:
        missing = 0 if self.all_gradients else -(self._all_elements() - done) * FP32
        return Peak(place=place, saved=saved, gathered=gathered, passing=passing, gradients=missing)

    def _all_elements(self) -> int:
        return sum(weight.share(self.shape.shards[weight.side]) for weight in self._weights())

    def _forward(self, number: int, layer: PlacedLayer) -> Iterator[Peak]:
        latest = left = 0
        before = ""
        for index, call in enumerate(layer.calls):
            own = self._gathers(number, call.unit)
            latest = own or latest
            here = sum(wait.placement.kept for wait in layer.waits if wait.first <= index)
            passing = left + sum(wait.dropped for wait in layer.waits if _in_forward(wait, index))
            left += call.leaves_bytes
            saved = self._below[number] + here
            if own and call.unit != before:
                gathered = self._root + self._gathering(number, call.unit)
                place = f"forward, gathering of {call.unit} of layer {number}"
                yield self._peak(place, saved=saved, gathered=gathered, passing=passing)
            gathered, before = self._root + (2 * own if own else latest), call.unit
            place = f"forward, {call.region} of layer {number}"
            yield self._peak(place, saved=saved, gathered=gathered, passing=passing + call.forward_bytes)

    def _around_the_loss(self) -> Iterator[Peak]:
        saved = self._below[-1] + self._out
        for moment in self.model.peak_candidates:
            gathered = self._root + sum(self._gathers(0, unit) for unit in moment.gathered)
            yield self._peak(moment.name, saved=saved, gathered=gathered, passing=moment.passing)

    def _backward(self, number: int, layer: PlacedLayer, buffer: int) -> Iterator[Peak]:
        order = list(enumerate(layer.calls))
        done = sum(self._elements(unit) for unit in self._units[number + 1 :]) + self._elements(self._outside)
        lasting = self._below[number]
        after = ""
        for index, call in reversed(order):
            for rerun in layer.reruns:
                if rerun.last == index:
                    yield from self._again(number, layer, rerun, buffer=buffer, done=done)
            own, following = self._gathers(number, call.unit), self._following(number, index)
            saved = lasting + self._alive(number, index) + self._ahead(number, index)
            gathered = self._root + own + following
            passing = self.model.stream_bytes + buffer + call.backward_bytes
            if own and call.unit != after:
                gathering = self._root + self._gathering(number, call.unit)
                waiting = self.model.stream_bytes + buffer + call.handed
                place = f"backward, gathering of {call.unit} of layer {number}"
                yield self._peak(place, saved=saved, gathered=gathering, passing=waiting, done=done)
            after = call.unit
            place = f"backward, {call.region} of layer {number}"
            yield self._peak(place, saved=saved, gathered=gathered, passing=passing, done=done)
            done += call.weight_elements if self._shards(call.unit) == 1 else 0
            before = layer.calls[index - 1].unit if index else ""
            if own and before != call.unit:
                elements = self._units[number].get(call.unit, 0)
                saved = lasting + self._alive(number, index - 1) + self._ahead(number, index - 1)
                shards = self._shards(call.unit)
                buffer = elements * FP32
                reduced = buffer + buffer // shards + call.handed + self.model.stream_bytes
                place = f"backward, gradients of {call.unit} of layer {number}"
                yield self._peak(place, saved=saved, gathered=self._root + following, passing=reduced, done=done)

    def _again(self, number: int, layer: PlacedLayer, rerun: Rerun, *, buffer: int, done: int) -> Iterator[Peak]:
        """Yield the moments of a region that runs again, while the gradient of what its last call returned waits."""
        waiting = self.model.stream_bytes + buffer + layer.calls[rerun.last].handed
        stay = (
            self._alive(number, rerun.last)
            + self._ahead(number, rerun.last)
            - sum(wait.dropped for wait in layer.waits if not wait.returned and wait.since >= rerun.start)
        )
        left = 0
        for index in range(rerun.start, rerun.last + 1):
            call = layer.calls[index]
            found = sum(
                wait.dropped
                for wait in layer.waits
                if not wait.returned and wait.since >= rerun.start and wait.first <= index
            )
            saved = self._below[number] + stay + found
            gathered = self._root + self._gathers(number, call.unit) + self._following(number, index)
            place = f"backward, {call.region} of layer {number}, run again"
            passing = waiting + left + call.forward_bytes
            yield self._peak(place, saved=saved, gathered=gathered, passing=passing, done=done)
            left += call.leaves_bytes

    def _alive(self, number: int, index: int) -> int:
        """Return the bytes of a layer that are on the device when backward has come to a call."""
        waits = self.layers[number].waits
        following = _next_moved(waits, index)
        if not self._fetched_before(number, following):
            following = -1
        total = 0
        for wait in waits:
            moved, inside = wait.placement.offloaded, wait.since <= index <= wait.until
            if wait.first <= index:
                total += wait.placement.kept
            if moved and (wait.until == following or (inside and wait.first <= index)):
                total += moved
            if wait.dropped and inside and (wait.returned or wait.first <= index):
                total += wait.dropped
        return total

    def _fetched_before(self, number: int, end: int) -> bool:
        """Whether backward has brought something back before the region that ends with a call: that one comes along."""
        here = any(wait.placement.offloaded and wait.until > end for wait in self.layers[number].waits)
        return here or any(wait.placement.offloaded for layer in self.layers[number + 1 :] for wait in layer.waits)

    def _ahead(self, number: int, index: int) -> int:
        """Return the bytes of the layer before that come back ahead, with those of this layer."""
        waits = self.layers[number].waits
        if not number or _next_moved(waits, index) >= 0:
            return 0
        below = self.layers[number - 1].waits
        last = max((wait.until for wait in below if wait.placement.offloaded), default=-1)
        return sum(wait.placement.offloaded for wait in below if wait.until == last)

    def _elements(self, units: Mapping[str, int]) -> int:
        return sum(elements // self._shards(unit) for unit, elements in units.items() if unit != "embed")

    def _reduced(self, units: Mapping[str, int], unit: str) -> int:
        """Return the bytes of a unit's gradients as FSDP reduces them: they stay until it reduces the next ones."""
        return units.get(unit, 0) * FP32 if unit and self._shards(unit) > 1 else 0

    def _following(self, number: int, index: int) -> int:
        """Return the bytes of the unit that backward needs next, gathered ahead of it."""
        calls: Sequence[Call] = self.layers[number].calls
        own = calls[index].unit
        for call in reversed(calls[:index]):
            if call.unit and call.unit != own:
                return self._gathers(number, call.unit)
        return self._gathers(number - 1, self._last_unit(number - 1)) if number else 0

    def _last_unit(self, number: int) -> str:
        return next((call.unit for call in reversed(self.layers[number].calls) if call.unit), "")


def _in_forward(wait: Wait, index: int) -> bool:
    """Whether a result that nobody keeps is still there in the forward of a call."""
    return wait.returned and wait.first <= index and (wait.stays or index <= wait.until)


def _next_moved(waits: Sequence[Wait], index: int) -> int:
    """Return the end of the region that backward comes to next and that comes back ahead; -1: there is none."""
    return max((wait.until for wait in waits if wait.placement.offloaded and wait.until < index), default=-1)
