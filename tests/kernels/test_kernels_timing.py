"""Times measured in turns, by a clock of the test's own, and the attention backends measured on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stoker.kernels import timing
from stoker.kernels.attention.backends import registry
from stoker.kernels.attention.call_spec import AttentionCall
from stoker.kernels.attention.installed_software import detect_installed_software
from stoker.kernels.attention.measure import calls_to_measure, measure_attention
from stoker.kernels.timing import Event, TimedCall, in_turns, record_event

CPU = torch.device("cpu")


def test_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(name: str, *seconds: float) -> TimedCall:
        def timed() -> list[Event]:
            order.append(name)
            events = [record_event("cpu")]
            for each in seconds:
                now[0] += each
                events.append(record_event("cpu"))
            return events

        return timed

    calls = {"fast": call("fast", 0.002, 0.004), "slow": call("slow", 0.5)}
    times = in_turns(calls, 3, 12.0, device_type="cpu")
    assert times["fast"] == [pytest.approx([2.0] * 3), pytest.approx([4.0] * 3)]
    assert times["slow"] == [pytest.approx([500.0] * 2)], "slow ones get fewer rounds"
    assert order[2:] == ["fast"] * 3 + ["slow"] * 2 + ["fast"] * 6, "each a third of a second round's order reversed"


def small(causal: bool = True) -> AttentionCall:
    call = next(call for call in calls_to_measure(None) if call.causal is causal)
    return replace(call, queries=16, keys=16, heads=1, groups=1)


def test_backends_measured_on_a_cpu() -> None:
    software = detect_installed_software()
    for causal in (True, False):
        found = measure_attention(small(causal), CPU, software, rounds=1, round_ms=0.0)
        assert list(found.milliseconds) == ["sdpa_flash", "unfused", "sdpa_math"]
        assert all(forward > 0 and backward > 0 for forward, backward in found.milliseconds.values())
        assert not found.refused


def test_a_backend_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(inputs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(registry.ATTENTION_FUNCTIONS, "sdpa_math", fails)
    found = measure_attention(small(), CPU, detect_installed_software(), rounds=1, round_ms=0.0)
    assert list(found.milliseconds) == ["sdpa_flash", "unfused"]
    assert found.refused == {"sdpa_math": "OutOfMemoryError: CUDA out of memory"}


def test_calls_of_a_gpu() -> None:
    calls = list(calls_to_measure((9, 0)))
    assert {call.head_dim for call in calls} == {64, 128, 256}
    assert {call.bias for call in calls} == {"none", "slopes", "distance_with_gradient"}
    assert all(call.batch * call.keys == 16384 and call.heads * call.head_dim == 2048 for call in calls)
    assert len(set(calls)) == len(calls) == 42
