"""Layers whose weights lie in host memory: what follows what on the streams of a GPU, whatever order it takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quire.kernels import layer_copies
from quire.kernels.layer_copies import StreamCopies
from quire.layers.streamed import StreamedLayers

CPU = torch.device("cpu")


@dataclass
class Work:
    """Work of a device. before: the work that has ended when it begins"""

    kind: str
    layer: int
    slot: int
    before: set[int]


@dataclass
class Device:
    """Two streams that note their work: each follows its own, and what it was told to wait for.

    streams   stream -> the work that ends before its next work
    last      the event that was recorded behind all that the stream of copies was given; None: something followed
    joined    events for which the main stream has waited
    """

    work: list[Work] = field(default_factory=list)
    streams: dict[str, set[int]] = field(default_factory=lambda: {"main": set(), "copies": set()})
    current: str = "main"
    last: "FakeEvent | None" = None
    joined: list["FakeEvent"] = field(default_factory=list)

    def launch(self, kind: str, layer: int, slot: int) -> None:
        """Note work on the current stream."""
        before = set(self.streams[self.current])
        self.work.append(Work(kind, layer, slot, before))
        self.streams[self.current] = before | {len(self.work) - 1}


class FakeStream:
    """A stream of the device, as torch.cuda has them."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, other: "FakeStream") -> None:
        self._device.streams[self.name] |= self._device.streams[other.name]
        self._device.last = None

    def wait_event(self, event: "FakeEvent") -> None:
        self._device.streams[self.name] |= event.done
        self._device.joined.append(event)


class FakeEvent:
    """An event of the device."""

    device: Device

    def record(self, stream: FakeStream) -> None:
        self.done = set(self.device.streams[stream.name])
        self.device.last = self


@dataclass
class Slot:
    """The memory of a layer in its slot; a copy to it is work of the device."""

    device: Device
    layer: int
    slot: int

    def copy_(self, source: object, *, non_blocking: bool) -> None:
        assert non_blocking
        self.device.launch("copy", self.layer, self.slot)


Made = Callable[[list[int], int], tuple[StreamedLayers, Device]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a function that makes layers of a device with so many slots."""

    def make(numbers: list[int], num_slots: int) -> tuple[StreamedLayers, Device]:
        device = Device()

        @contextmanager
        def stream(given: FakeStream) -> Iterator[None]:
            before, device.current = device.current, given.name
            yield
            device.current = before

        event = type("Event", (FakeEvent,), {"device": device})
        for name, value in {
            "Stream": lambda _: FakeStream(device, "copies"),
            "current_stream": lambda _: FakeStream(device, device.current),
            "stream": stream,
            "Event": event,
        }.items():
            monkeypatch.setattr(layer_copies.torch.cuda, name, value)
        layers = StreamedLayers(numbers, 0, num_slots, StreamCopies(CPU))
        own: Any = layers._layers
        for number, layer in own.items():
            layer.pieces = [(object(), Slot(device, number, layer.slot))]
        return layers, device

    return make


def run(layers: StreamedLayers, device: Device, order: list[int]) -> None:
    """Run a pass, then what follows it on the main stream."""
    own: Any = layers._layers
    for index in layers.visited(order):
        device.launch("run", index, own[index].slot if index in own else -1)
    used = device.streams["copies"]
    assert not used or device.last in device.joined, "a capture would end before its streams have joined"
    device.launch("end", -1, -1)


def check(work: list[Work]) -> None:
    """Assert for any order that the device may take: a layer runs with its own weights, and no copy outlives a pass."""
    for number, one in enumerate(work):
        if one.kind == "end":
            assert all(other in one.before for other in range(number) if work[other].kind == "copy")
        if one.kind != "run" or one.slot < 0:
            continue
        copies = [other for other, it in enumerate(work) if it.kind == "copy" and it.slot == one.slot]
        before = [other for other in copies if other in one.before]
        assert before and work[before[-1]].layer == one.layer, f"layer {one.layer} runs with others' weights"
        for other in set(copies) - set(before):
            assert number in work[other].before, f"layer {one.layer} may run while layer {work[other].layer} comes"
        assert all(other in work[before[-1]].before for other in before[:-1]), "copies to a slot are made in turn"


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize(
    ("numbers", "orders"),
    [
        ([2, 5, 8, 11], [list(range(12)), list(range(12))]),  # two steps
        ([0, 1, 2, 3, 4], [list(range(5)), [0], [4]]),  # all layers, then a warm-up of some
        ([1, 2, 3, 4, 5], [[1, 3, 5], [2], [0], list(range(6))]),  # neighbours in a pass may share a slot
    ],
)
def test_a_layer_runs_with_its_own_weights(
    made: Made, numbers: list[int], orders: list[list[int]], num_slots: int
) -> None:
    layers, device = made(numbers, num_slots)
    for order in orders:
        run(layers, device, order)
    check(device.work)
    assert sum(one.kind == "copy" for one in device.work) == sum(one in numbers for order in orders for one in order)


def test_the_next_layer_comes_while_a_layer_runs(made: Made) -> None:
    layers, device = made([2, 5, 8, 11], 2)
    run(layers, device, list(range(12)))
    place = {(one.kind, one.layer): number for number, one in enumerate(device.work)}
    copies = {one.layer: one for one in device.work if one.kind == "copy"}
    assert not copies[2].before and copies[5].before == {place["copy", 2]}  # at once, before any layer
    assert (
        place["run", 2] in copies[8].before and place["run", 3] not in copies[8].before
    )  # as soon as its slot is free
    assert place["run", 5] in copies[11].before and place["run", 6] not in copies[11].before


def test_a_pass_that_failed_leaves_nothing_behind(made: Made) -> None:
    layers, device = made([0, 1, 2, 3], 2)
    passed = layers.visited(range(4))
    assert next(passed) == 0
    device.launch("run", 0, 0)
    passed.close()
    run(layers, device, [0, 1, 2, 3])
    check(device.work)
