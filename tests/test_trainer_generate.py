import argparse
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.trainer import generate
from stoker.trainer.data.tokenizers import ByteTokenizer, CharTokenizer
from stoker.trainer.errors import UserError
from stoker.trainer.sampling import TextStream, generate_text, next_token_distribution, prompt_tokens, sample


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
@settings(max_examples=300, deadline=None)
def test_distribution_is_the_references(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Ties included: the logits are drawn from few values."""
    found = next_token_distribution(torch.tensor(logits), temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_allclose(found.numpy(), _reference(logits, temperature, top_k, top_p), rtol=1e-9, atol=1e-12)


def test_top_p_reached_exactly_takes_no_more() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert next_token_distribution(logits, top_p=0.5).count_nonzero() == 1
    assert next_token_distribution(logits, top_p=0.51).count_nonzero() == 2
    assert next_token_distribution(logits, top_p=1.0).count_nonzero() == 4


def test_top_p_works_on_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.3]).log()
    assert next_token_distribution(logits, top_k=2, top_p=0.57).count_nonzero() == 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([1.0, -math.inf, 0.0, -math.inf])
    probabilities = next_token_distribution(logits, top_k=4, temperature=5.0)
    assert probabilities[[1, 3]].sum() == 0
    assert probabilities.sum().item() == pytest.approx(1)


def test_extreme_temperatures_stay_finite() -> None:
    for temperature in (1e-30, 1e30):
        probabilities = next_token_distribution(torch.tensor([500.0, -500.0]), temperature=temperature)
        assert probabilities.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        next_token_distribution(torch.zeros(3), **arguments)  # pyright: ignore[reportArgumentType]


def test_diverged_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="diverged"):
        next_token_distribution(torch.tensor([0.0, math.nan]))


class _Model:
    """Logits that depend on the last two tokens, and a record of the contexts it saw."""

    def __init__(self, vocabulary: int = 259) -> None:
        table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.table = table
        self.seen: list[list[int]] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        self.seen.append(tokens[0].tolist())
        previous = torch.roll(tokens, 1)
        return self.table[tokens] + 0.5 * self.table[previous]


def _draw(seed: int, **options) -> list[int]:
    return list(sample(_Model(), [5, 6], context=8, max_new_tokens=30, seed=seed, **options))


def test_a_seed_gives_one_text_whatever_the_global_generator_does() -> None:
    torch.manual_seed(1)
    first = _draw(3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert _draw(3) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert _draw(4) != first
    assert len(first) == 30


def test_greedy_takes_the_best_token() -> None:
    model = _Model()
    tokens = list(sample(model, [5, 6], context=100, max_new_tokens=5, temperature=0))
    expected = [5, 6]
    for _ in range(5):
        expected.append(int(_Model()(torch.tensor([expected]))[0, -1].argmax()))
    assert tokens == expected[2:]


def test_context_is_cropped_to_what_the_model_can_see() -> None:
    model = _Model()
    prompt = list(range(20))
    tokens = list(sample(model, prompt, context=8, max_new_tokens=3))
    whole = prompt + tokens
    assert model.seen == [whole[12 + i : 20 + i] for i in range(3)]


def test_stop_token_ends_the_text_without_being_part_of_it() -> None:
    free = _draw(3)
    stopped = _draw(3, stop={free[10]})
    assert stopped == free[: free.index(free[10])]


def test_drawn_tokens_follow_the_distribution() -> None:
    """Chi-square of 4000 draws over the five tokens of a top-5; 4 degrees of freedom."""
    logits = torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(0))
    draws = [next(sample(lambda _: logits, [0], context=4, max_new_tokens=1, top_k=5, seed=s)) for s in range(4000)]
    probabilities = _reference(logits[0, 0].tolist(), 1.0, 5, None)
    counts = np.bincount(draws, minlength=40)
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = 4000 * probabilities[kept]
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.5


def test_prompt_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="`tokens`"):
        next(sample(_Model(), [], context=8, max_new_tokens=1))


@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_text_stream_prints_everything_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, stop)
    printed = ""
    for token in tokenizer.encode(text):
        printed += stream.feed(int(token))
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
    stream = TextStream(tokenizer, ["\n\n"])
    fed = [stream.feed(int(token)) for token in tokenizer.encode("é\na\n\nb")]
    assert fed[:2] == ["", "é"]
    assert fed[2:4] == ["", "\na"]
    assert "".join(fed) == "é\na"
    assert stream.stopped


def test_of_stops_that_complete_together_the_longest_counts() -> None:
    stream = TextStream(ByteTokenizer(), ["bc", "abc", "c"])
    assert "".join(stream.feed(int(token)) for token in ByteTokenizer().encode("xabcd")) == "x"


def test_torn_character_is_shown_as_replacement() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.feed(195 + 3) == ""
    assert stream.close() == "\ufffd"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("\nab")])
def test_generated_text_is_the_sampled_tokens(tokenizer: ByteTokenizer | CharTokenizer) -> None:
    model = _Model(tokenizer.vocab_size)
    pieces = list(generate_text(model, tokenizer, "ab", context=8, max_new_tokens=40, seed=1, top_k=20))
    stop = () if tokenizer.eos_id is None else [tokenizer.eos_id]
    ids = list(sample(model, prompt_tokens(tokenizer, "ab"), context=8, max_new_tokens=40, seed=1, top_k=20, stop=stop))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert ids


def test_text_starts_like_a_document() -> None:
    assert prompt_tokens(ByteTokenizer(), "") == [1]
    assert prompt_tokens(ByteTokenizer(), "a") == [1, 100]
    assert prompt_tokens(CharTokenizer("\nab"), "") == [0]
    assert prompt_tokens(CharTokenizer("ab"), "") == [0]
    assert prompt_tokens(CharTokenizer("\nab"), "ab") == [1, 2]
    with pytest.raises(UserError, match="character 'z'"):
        prompt_tokens(CharTokenizer("ab"), "z")


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    generate.add_arguments(parser)
    return parser.parse_args(["--checkpoint", "run", *arguments])


def test_options() -> None:
    args = _parse("--top-p", "0.5", "--top-k", "3", "--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "7")
    assert (args.top_p, args.top_k, args.temperature, args.stop, args.seed) == (0.5, 3, 0, ["a", "b"], 7)


@pytest.mark.parametrize(
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
    ],
)
def test_bad_options_are_refused(option: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="must be"):
        _parse(option, value)


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert generate.printable("a\tb\n\x1b[31m\x9b\x7f\x00é") == "a\tb\n\ufffd[31m\ufffd\ufffd\ufffdé"
