"""Learning rates: the golden numbers of nemo_semantics, Appendix B."""

from tiers import looped

from stoker.trainer.config.lr_schedule import (
    SCHEDULES,
    CosineAnnealing,
    InverseSquareRootAnnealing,
    NoamAnnealing,
    NoamHoldAnnealing,
    PolynomialDecayAnnealing,
    PolynomialHoldDecayAnnealing,
    RelativeStep,
    SquareAnnealing,
    SquareRootAnnealing,
    T5InverseSquareRootAnnealing,
    WarmupAnnealing,
    WarmupHoldAnnealLinear,
    WarmupHoldAnnealOneMinusSquareRoot,
    WarmupHoldPolicy,
    WarmupPolicy,
)
from stoker.trainer.config.schema.optim import OptimBlock, build_schedule

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
    # By hand from the formulas of NeMo's lr_scheduler.py: lr 1, min_lr 0.1, 100 steps, 9 of warm-up, 10 of hold.
    (WarmupPolicy(1.0, 0.1, 100, 9), {0: 0.1, 8: 0.9, 9: 1, 50: 1, 100: 1, 101: 0.1}),
    (InverseSquareRootAnnealing(1.0, 0.1, 1000, 9), {0: 0.1, 9: 1, 39: 0.5, 999: 0.1, 1000: 0.09995, 1001: 0.1}),
    (SquareAnnealing(1.0, 0.1, 109, 9), {9: 1, 59: 0.25, 89: 0.1, 109: 0.1, 110: 0.1}),
    (SquareRootAnnealing(1.0, 0.1, 100, 9), {9: 1, 10: 0.948683, 75: 0.5, 100: 0.1, 101: 0.1}),
    (PolynomialDecayAnnealing(1.0, 0.1, 109, 9, power=2.0), {9: 1, 59: 0.325, 109: 0.1, 110: 0.1}),
    (WarmupHoldPolicy(1.0, 0.1, 100, 9, hold_steps=10), {0: 0.1, 9: 1, 19: 1, 60: 1, 100: 1, 101: 0.1}),
    (
        PolynomialHoldDecayAnnealing(1.0, 0.1, 119, 9, hold_steps=10, power=2.0),
        {0: 0.1, 9: 1, 18: 1, 19: 1, 69: 0.325, 119: 0.1, 120: 0.1},
    ),
    (WarmupHoldAnnealLinear(1.0, 0.1, 119, 9, hold_steps=10), {0: 0.1, 19: 1, 20: 0.991, 69: 0.55, 119: 0.1, 120: 0.1}),
    (
        WarmupHoldAnnealOneMinusSquareRoot(1.0, 0.1, 119, 9, hold_steps=10),
        {0: 0.1, 19: 1, 20: 0.9, 44: 0.5, 118: 0.1, 119: 0.1},
    ),
    (NoamHoldAnnealing(1.0, 0.1, 1000, 9, hold_steps=10), {0: 0.1, 9: 1, 18: 1, 19: 1, 46: 0.5, 1000: 0.1}),
    (NoamHoldAnnealing(1.0, 0.1, 1000, 9, hold_steps=10, decay_rate=1.0), {19: 1, 28: 0.5, 1000: 0.1, 1001: 0.1}),
    (
        NoamAnnealing(1.0, 0.01, 16, 64),
        {0: 0.00195312, 1: 0.00195312, 4: 0.0078125, 16: 0.03125, 64: 0.015625, 999: 0.01},
    ),
    (NoamAnnealing(2.0, 0.0, 0, 16), {0: 0.5, 1: 0.5, 4: 0.25, 100: 0.05}),
    (T5InverseSquareRootAnnealing(1e-5, 500, 100), {0: 0.1, 100: 0.1, 400: 0.05, 500: 0.0447214, 501: 1e-5}),
    (RelativeStep(warmup_init=False), {0: 0.01, 9_999: 0.01, 39_999: 0.005}),
    (RelativeStep(warmup_init=True), {0: 1e-6, 99: 1e-4, 9_999: 0.01, 39_999: 0.005}),
]


@looped(("schedule", "golden"), GOLDEN)
def test_golden_numbers(schedule, golden):
    for step, lr in golden.items():
        assert float(f"{schedule(step):.6g}") == lr, step


def test_cosine_leaves_the_peak_slowly():
    assert COSINE(501) < COSINE(500)
    assert float(f"{COSINE(501):.6g}") == 0.0002


@looped("name", SCHEDULES)
@looped(("warmup", "length"), [(0, 1), (0, 10), (1, 10), (10, 10), (20, 10)])
def test_every_step_of_a_short_schedule_has_a_rate(name, warmup, length):
    keys = {"name": name, "warmup_steps": warmup, "max_steps": length, "min_lr": 0.1, "constant_steps": 1, "d_model": 4}
    for hold in (0, 3):
        schedule = build_schedule(optim(**keys, hold_steps=hold), 1)
        assert all(0 <= schedule(step) <= 1.0 for step in range(length + 2))


def optim(**sched):
    return OptimBlock.model_validate({"lr": 1.0, "sched": sched})


def test_ratios_are_parts_of_the_length_rounded_down():
    schedule = build_schedule(optim(warmup_ratio=0.015, constant_ratio=0.2), max_steps=1000)
    assert schedule == CosineAnnealing(1.0, 0.0, 1000, warmup_steps=15, constant_steps=200)
    assert build_schedule(optim(name="WarmupAnnealing", warmup_ratio=0.0159, max_steps=100), 7) == WarmupAnnealing(
        1.0, 0.0, 100, warmup_steps=1
    )


def test_keys_reach_their_schedule():
    assert build_schedule(optim(name="PolynomialHoldDecayAnnealing", hold_ratio=0.25, power=3.0), 20) == (
        PolynomialHoldDecayAnnealing(1.0, 0.0, 20, 0, hold_steps=5, power=3.0)
    )
    assert build_schedule(optim(name="NoamAnnealing", warmup_ratio=0.5, d_model=8), 20) == NoamAnnealing(
        1.0, 0.0, 10, 8
    )
    assert build_schedule(optim(name="NoamHoldAnnealing", warmup_steps=2, decay_rate=1.0), 20) == (
        NoamHoldAnnealing(1.0, 0.0, 20, 2, hold_steps=0, decay_rate=1.0)
    )
    assert build_schedule(optim(name="T5InverseSquareRootAnnealing", constant_ratio=0.5), 20) == (
        T5InverseSquareRootAnnealing(0.0, 20, 10)
    )


def test_the_relative_step_is_adafactors():
    keys = {"relative_step": True, "warmup_init": True}
    assert build_schedule(OptimBlock.model_validate({"name": "adafactor", **keys}), 9) == RelativeStep(True)
    assert isinstance(build_schedule(OptimBlock.model_validate(keys), 9), CosineAnnealing)
