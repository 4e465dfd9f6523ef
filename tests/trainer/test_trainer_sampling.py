import argparse
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, looped

from stoker.trainer.cli import generate
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.generation.sampling import DIVERGED, SamplingParams, TextStreamer, draw_uniforms


def _reference(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Temperature, then the k best, then the shortest head of them that reaches p: with plain loops."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        ranked, temperature = ranked[:1], 1.0
    ranked = ranked[:top_k]
    weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
    weights = [weight / math.fsum(weights) for weight in weights]
    if top_p is not None:
        head, total = 0, 0.0
        while head < len(ranked) and (head == 0 or total < top_p):
            total += weights[head]
            head += 1
        ranked, weights = ranked[:head], weights[:head]
    result = np.zeros(len(logits))
    result[ranked] = np.array(weights) / math.fsum(weights)
    return result


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.25, 0.8, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 45),
    top_p=st.none() | st.sampled_from([0.01, 0.3141, 0.7243, 0.9517]),
)
@examples(300)
def test_distribution_is_the_references(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Ties included: the logits are drawn from few values."""
    found = SamplingParams(temperature, top_k, top_p).probabilities(torch.tensor(logits))
    np.testing.assert_allclose(found.numpy(), _reference(logits, temperature, top_k, top_p), rtol=1e-9, atol=1e-12)


def test_top_p_reached_exactly_takes_no_more() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    for top_p, count in ((0.5, 1), (0.51, 2), (1.0, 4)):
        assert SamplingParams(1.0, top_p=top_p).probabilities(logits).count_nonzero() == count


def test_top_p_works_on_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.3]).log()
    assert SamplingParams(1.0, 2, 0.57).probabilities(logits).count_nonzero() == 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([1.0, -math.inf, 0.0, -math.inf])
    probabilities = SamplingParams(5.0, 4).probabilities(logits)
    assert probabilities[[1, 3]].sum() == 0
    assert probabilities.sum().item() == pytest.approx(1)


def test_extreme_temperatures_stay_finite() -> None:
    for temperature in (1e-30, 1e30):
        probabilities = SamplingParams(temperature).probabilities(torch.tensor([500.0, -500.0]))
        assert probabilities.sum().item() == pytest.approx(1)


@looped(
    ("arguments", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        SamplingParams(**arguments)  # pyrefly: ignore[bad-argument-type]


# ---------------------------------------------------------------- the choice


def test_greedy_takes_the_best_token_and_says_where_there_is_none() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [math.nan, 0.0, 0.0], [-math.inf] * 3, [math.inf, 0.0, 0.0]])
    numbers = torch.zeros(4, dtype=torch.float64)
    for temperature in (0.0, 0.5):
        chosen = SamplingParams(temperature).sample(logits, numbers).tolist()
        assert chosen[1:] == [DIVERGED] * 3
    assert SamplingParams().sample(logits, numbers)[0] == 1


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=20),
    sampling=st.builds(
        SamplingParams,
        st.sampled_from([0.25, 1.0, 3.0]),
        st.none() | st.integers(1, 25),
        st.none() | st.sampled_from([0.3141, 0.9517, 1.0]),
    ),
    number=st.floats(0, 1, exclude_max=True),
)
@examples(200)
def test_a_number_decides_a_token_by_the_distribution(
    logits: list[float], sampling: SamplingParams, number: float
) -> None:
    """Tokens lie on [0, 1) side by side, each as long as it is probable: by rank, or by id where all take part."""
    wide = torch.tensor([[-math.inf, *logits, -math.inf]])
    token = int(sampling.sample(wide, torch.tensor([number], dtype=torch.float64)))
    probabilities = sampling.probabilities(wide)[0]
    assert probabilities[token] > 0
    whole = sampling.top_k is None and sampling.top_p in (None, 1.0)
    order = range(wide.shape[1]) if whole else sorted(range(wide.shape[1]), key=lambda t: (-float(wide[0, t]), t))
    before = math.fsum(float(probabilities[other]) for other in list(order)[: list(order).index(token)])
    assert before - 1e-9 <= number <= before + float(probabilities[token]) + 1e-9


def test_drawn_tokens_follow_the_distribution() -> None:
    """Chi-square of 4000 draws over the five tokens of a top-5; 4 degrees of freedom."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    numbers = draw_uniforms(range(4000), 1)[:, 0]
    draws = SamplingParams(1.0, 5).sample(logits.expand(4000, 40), numbers).numpy()
    probabilities = _reference(logits[0].tolist(), 1.0, 5, None)
    counts = np.bincount(draws, minlength=40)
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = 4000 * probabilities[kept]
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.5


def test_numbers_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = draw_uniforms([3, 4], 5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(draw_uniforms([7, 3], 9)[1, :5], first[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first[0], first[1])


def test_tokens_that_are_there_become_less_probable() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, -1.0]])
    seen = torch.tensor([[True, False, False, True]])
    number = torch.zeros(1, dtype=torch.float64)
    assert SamplingParams(repetition_penalty=1.2).sample(logits, number, seen) == 0
    assert SamplingParams(repetition_penalty=1.5).sample(logits, number, seen) == 1
    only = torch.tensor([[-1.0, -1.2]])
    assert SamplingParams(repetition_penalty=1.5).sample(only, number, torch.tensor([[True, False]])) == 1


# ---------------------------------------------------------------- text as it appears


@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_text_stream_prints_everything_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStreamer(tokenizer, stop)
    printed = ""
    for token in tokenizer.encode(text):
        printed += stream.put(int(token))
        if stream.stopped:
            break
    printed += stream.close()
    ends = [text.find(string) for string in stop if string in text]
    # A stop string ends the text where it is first complete; of two that complete together the earlier start counts.
    complete = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    assert stream.stopped == bool(ends)
    if complete:
        last = min(end for end, _ in complete)
        assert printed == text[: min(start for end, start in complete if end == last)]
    else:
        assert printed == text


def test_text_stream_waits_for_whole_characters_and_possible_stops() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStreamer(tokenizer, ["\n\n"])
    fed = [stream.put(int(token)) for token in tokenizer.encode("é\na\n\nb")]
    assert fed[:2] == ["", "é"]
    assert fed[2:4] == ["", "\na"]
    assert "".join(fed) == "é\na"
    assert stream.stopped


def test_of_stops_that_complete_together_the_longest_counts() -> None:
    stream = TextStreamer(ByteTokenizer(), ["bc", "abc", "c"])
    assert "".join(stream.put(int(token)) for token in ByteTokenizer().encode("xabcd")) == "x"


def test_torn_character_is_shown_as_replacement() -> None:
    stream = TextStreamer(ByteTokenizer())
    assert stream.put(195 + 3) == ""
    assert stream.close() == "\ufffd"


# ---------------------------------------------------------------- options


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    generate.add_arguments(parser)
    return parser.parse_args(["--checkpoint", "run", *arguments])


def test_options() -> None:
    args = _parse("--top-p", "0.5", "--top-k", "3", "--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "7")
    assert (args.top_p, args.top_k, args.temperature, args.stop, args.seed) == (0.5, 3, 0, ["a", "b"], 7)


@looped(
    ("option", "value"),
    [
        ("--top-k", "0"),
        ("--top-k", "1.5"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--temperature", "-1"),
        ("--temperature", "inf"),
        ("--temperature", "warm"),
        ("--max-new-tokens", "-3"),
        ("--max-new-tokens", "9" * 5000),
        ("--seed", "-1"),
        ("--repetition-penalty", "0"),
        ("--length-penalty", "nan"),
        ("--num-beams", "0"),
        ("--stop", ""),
    ],
)
def test_bad_options_are_refused(option: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="must be"):
        _parse(option, value)


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert generate.replace_control_characters("a\tb\n\x1b[31m\x9b\x7f\x00é") == "a\tb\n\ufffd[31m\ufffd\ufffd\ufffdé"
