"""The moving average: the formula, bits that come back, and going on exactly."""

import pytest
import torch

from stoker.trainer.optim.ema import EMA

NORM = torch.tensor(1.0)


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in (("a", (3, 5)), ("b", (7,)))
    }


def averages(ema):
    return {name: piece.local for name, piece in ema.local_shards().items()}


def train(weights, step):
    with torch.no_grad():
        for number, weight in enumerate(weights.values()):
            weight.add_(0.1 * (step + 1) * (number + 1))


def test_the_average_follows_its_formula():
    weights = parameters(torch.float64)
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    ema = EMA(weights, decay=0.9)
    for step in range(1, 6):
        train(weights, step)
        ema.update(step, NORM)
        expected = {name: 0.9 * value + 0.1 * weights[name].detach() for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(averages(ema)[name], value, rtol=1e-12, atol=1e-15)


def test_it_is_updated_every_n_steps():
    weights = parameters()
    ema = EMA(weights, decay=0.0, every_n_steps=3)
    seen = []
    for step in range(1, 8):
        train(weights, step)
        ema.update(step, NORM)
        seen.append(torch.equal(averages(ema)["a"], weights["a"]))
    assert seen == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("norm", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_skipped_step_leaves_it_as_it_is(norm, dtype):
    weights = parameters(dtype)
    ema = EMA(weights, decay=0.9)
    train(weights, 1)
    before = {name: average.clone() for name, average in averages(ema).items()}
    ema.update(1, torch.tensor(norm))
    assert all(torch.equal(average, before[name]) for name, average in averages(ema).items())
    ema.update(2, NORM)
    assert not any(torch.equal(average, before[name]) for name, average in averages(ema).items())


def test_a_bf16_weight_has_an_fp32_average_that_small_steps_move():
    weights = {"a": torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    ema = EMA(weights, decay=0.999)
    with torch.no_grad():
        weights["a"].add_(0.125)
    ema.update(1, NORM)
    average = averages(ema)["a"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((4,), 1.000125))


def test_main_weights_are_averaged_where_there_are_some():
    weights = parameters(torch.bfloat16)
    main = {"a": weights["a"].detach().float() + 1e-4}
    found = averages(EMA(weights, main_weights=main, decay=0.5))
    assert torch.equal(found["a"], main["a"])
    assert torch.equal(found["b"], weights["b"].detach().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_the_bits_come_back_in_the_same_memory(dtype, cpu_offload):
    weights = parameters(dtype)
    ema = EMA(weights, decay=0.5, cpu_offload=cpu_offload)
    train(weights, 1)
    ema.update(1, NORM)
    before = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in weights.items()}

    def failing_validation():
        with ema.applied():
            for name, weight in weights.items():
                assert torch.equal(weight.detach(), averages(ema)[name].to(dtype))
                assert not torch.equal(weight.detach(), before[name][1])
            raise KeyError

    with pytest.raises(KeyError):
        failing_validation()
    for name, weight in weights.items():
        assert weight.data_ptr() == before[name][0]
        assert torch.equal(weight.detach(), before[name][1])
        assert weight.requires_grad


def test_a_reloaded_average_goes_on_bit_for_bit():
    weights = parameters(torch.bfloat16)
    whole = EMA(weights, decay=0.99)
    saved, halfway = {}, {}
    for step in range(1, 9):
        train(weights, step)
        whole.update(step, NORM)
        if step == 4:
            saved = {name: tensor.clone() for name, tensor in averages(whole).items()}
            halfway = {name: weight.detach().clone() for name, weight in weights.items()}
    again = {name: torch.nn.Parameter(weight) for name, weight in halfway.items()}
    resumed = EMA(again, decay=0.99)
    for name, average in averages(resumed).items():  # as a checkpoint fills them
        average.copy_(saved[name])
    for step in range(5, 9):
        train(again, step)
        resumed.update(step, NORM)
    for name, tensor in averages(whole).items():
        assert torch.equal(tensor, averages(resumed)[name])
