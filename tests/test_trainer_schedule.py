"""Learning rates: the golden numbers of nemo_semantics, Appendix B."""

import pytest

from stoker.trainer.config.blocks import OptimBlock
from stoker.trainer.schedule import CosineAnnealing, WarmupAnnealing, build_schedule

COSINE = CosineAnnealing(lr=2e-4, min_lr=2e-5, max_steps=100_000, warmup_steps=500)
COSINE_CONSTANT = CosineAnnealing(lr=2e-4, min_lr=2e-5, max_steps=100_000, warmup_steps=500, constant_steps=20_000)
WARMUP = WarmupAnnealing(lr=1e-4, min_lr=1e-5, max_steps=100_000, warmup_steps=1000)
GOLDEN = [
    (COSINE, {0: 3.99202e-07, 250: 0.0001002, 500: 0.0002, 50250: 0.00011, 100000: 2e-05, 100001: 2e-05}),
    (
        COSINE_CONSTANT,
        {0: 0.0, 250: 0.0001, 500: 0.0002, 40000: 0.000110889, 80000: 2e-05, 80001: 2e-05, 100000: 2e-05},
    ),
    (WARMUP, {0: 9.99001e-08, 500: 5.005e-05, 1000: 0.0001, 50500: 5.5e-05, 100000: 1e-05, 100001: 1e-05}),
]


@pytest.mark.parametrize(("schedule", "golden"), GOLDEN)
def test_golden_numbers(schedule, golden):
    for step, lr in golden.items():
        assert float(f"{schedule(step):.6g}") == lr, step


def test_cosine_leaves_the_peak_slowly():
    assert COSINE(501) < COSINE(500)
    assert float(f"{COSINE(501):.6g}") == 0.0002


@pytest.mark.parametrize("kind", [CosineAnnealing, WarmupAnnealing])
@pytest.mark.parametrize(("warmup", "length"), [(0, 1), (0, 10), (10, 10), (20, 10)])
def test_every_step_of_a_short_schedule_has_a_rate(kind, warmup, length):
    schedule = kind(lr=1.0, min_lr=0.1, max_steps=length, warmup_steps=warmup)
    assert all(0 < schedule(step) <= 1.0 for step in range(length + 2))


def optim(**sched):
    return OptimBlock.model_validate({"lr": 1.0, "sched": sched})


def test_ratios_are_parts_of_the_length_rounded_down():
    schedule = build_schedule(optim(warmup_ratio=0.015, constant_ratio=0.2), max_steps=1000)
    assert schedule == CosineAnnealing(1.0, 0.0, 1000, warmup_steps=15, constant_steps=200)
    assert build_schedule(optim(name="WarmupAnnealing", warmup_ratio=0.0159, max_steps=100), 7) == WarmupAnnealing(
        1.0, 0.0, 100, warmup_steps=1
    )
