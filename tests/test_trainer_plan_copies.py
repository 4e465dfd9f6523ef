"""Waiting for copies to the host and back: what a link that does one copy after the other leaves to wait for."""

from __future__ import annotations

import pytest

from stoker.trainer.plan.copies import LayerTime, waited_in_backward, waited_in_forward


def layers(count: int, offloaded: int, *, forward: float = 1.0, copy: float) -> list[LayerTime]:
    """So many equal layers, of which the first send something; a backward takes twice as long as a forward."""
    return [LayerTime(forward, 2 * forward, copy * (number < offloaded)) for number in range(count)]


def test_nothing_is_waited_for_without_copies():
    assert waited_in_forward(layers(4, 0, copy=9.0), 4) == 0
    assert waited_in_backward(layers(4, 0, copy=9.0), 3) == 0


@pytest.mark.parametrize(
    ("copy", "forward", "backward"),
    [
        (3.5, 0.0, 0.0),
        (4.0, 1.0, 0.0),  # the second has left at 8, before the last layer, which could run at 7
        # the first at 7, not at 6, the second at 14; layer 1 begins to come at 2, layer 0 follows it, needed at 14
        (7.0, 7.0, 2.0),
        (10.0, 13.0, 8.0),
    ],
)
def test_copies_of_two_layers_of_eight(copy: float, forward: float, backward: float):
    some = layers(8, 2, copy=copy)
    assert waited_in_forward(some, 6) == pytest.approx(forward)
    assert waited_in_backward(some, 5) == pytest.approx(backward)


def test_with_one_layer_left_each_waits_for_the_one_before():
    """The link is what takes time: the forward ends a layer after the last copy, the backward begins with a layer."""
    some = layers(5, 4, copy=10.0)
    assert waited_in_forward(some, 1) == pytest.approx(4 * 10 + 1 - 5)
    # layer 3 comes while layer 4 runs, and from then on the link never rests
    assert waited_in_backward(some, 1) == pytest.approx(4 * 10 + 2 - 5 * 2)


def test_short_copies_of_all_layers_are_hidden():
    some = layers(5, 4, copy=0.5)
    assert waited_in_forward(some, 1) == 0
    assert waited_in_backward(some, 1) == 0
