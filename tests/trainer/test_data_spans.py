"""Span corruption: lengths to the token, sentinels in order, the text back exactly, as much noise as was asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from span_texts import restore

from stoker.trainer.config.span_lengths import (
    Corruption,
    clipped_geometric_mean,
    corrupted_lengths,
    noise_counts,
    window_length,
)
from stoker.trainer.data.datasets.samples import philox_generator
from stoker.trainer.data.tasks.noise_spans import (
    SpanLengthDistribution,
    SpanMask,
    apply_span_mask,
    ngram_span_mask,
    random_span_mask,
    token_word_edges,
    unit_boundaries,
)
from stoker.trainer.data.tasks.sentinels import find_mask_token_id, sentinel_ids, with_sentinels
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from stoker.trainer.data.tokenizers.tokenizer_document import tokenizer_from_dict
from stoker.trainer.data.tokenizers.tokenizer_json import build_json_tokenizer, canonical_json
from stoker.trainer.utils.errors import UserError

T5 = Corruption(0.15, 3.0)
SENTINELS = np.arange(5000, 4000, -1)
corruptions = st.builds(Corruption, st.floats(0.01, 0.9), st.floats(1.0, 30.0))
usual = st.builds(Corruption, st.floats(0.01, 0.45), st.floats(1.0, 30.0)) | st.just(Corruption(0.5, 3.0))
lengths = st.integers(2, 700)
seeds = st.integers(0, 2**32)


def masks(length: int, corruption: Corruption, seed: int, rows: int = 1) -> SpanMask:
    words = philox_generator(seed, 0).random_raw(rows * (length - 2)).reshape(rows, length - 2)
    return random_span_mask(words, length, corruption)


def t5_lengths(inputs_length: int, density: float, mean: float) -> tuple[int, int]:
    """T5's `compute_input_and_target_lengths`, in words: try one text length after the other."""

    def sides(tokens: int) -> tuple[int, int]:
        noise = round(tokens * density)
        spans = round(noise / mean)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length
    while sides(tokens + 1)[0] <= inputs_length:
        tokens += 1
    return tokens, sides(tokens)[1]


def test_the_lengths_of_t5_and_nanot5():
    assert window_length(512, T5) == 568
    assert corrupted_lengths(568, T5) == (512, 114)
    assert corrupted_lengths(window_length(1024, Corruption(0.15, 20)), Corruption(0.15, 20)) == (1024, 189)
    for encoder in (64, 128, 500, 512, 2048):
        for corruption in (T5, Corruption(0.4, 3), Corruption(0.15, 8), Corruption(0.15, 20)):
            expected = t5_lengths(encoder, *corruption)
            raw = window_length(encoder, corruption)
            assert (raw, corrupted_lengths(raw, corruption)[1]) == expected


@given(st.integers(3, 3000), usual)
def test_every_encoder_length_is_filled_to_the_token(encoder, corruption):
    raw = window_length(encoder, corruption)
    filled, decoder = corrupted_lengths(raw, corruption)
    assert filled == encoder
    assert window_length(encoder, corruption, decoder) == raw
    assert corrupted_lengths(raw + 1, corruption)[0] == encoder + 1


def test_a_decoder_side_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="at least 114"):
        window_length(512, T5, 100)
    with pytest.raises(ValueError, match="cannot be filled exactly; use 3"):
        window_length(4, Corruption(0.5, 1.0))  # 3 tokens give 3, 4 give 5
    with pytest.raises(ValueError, match="at least 3"):
        window_length(2, T5)


@given(lengths, corruptions, seeds)
def test_noise_is_what_was_asked_for(length, corruption, seed):
    mask = masks(length, corruption, seed, rows=3)
    noise, spans = noise_counts(length, corruption)
    assert (mask.noise.sum(1) == noise).all()
    assert (mask.starts.sum(1) == spans).all()
    assert noise == min(max(round(length * corruption.noise_density), 1), length - 1)
    assert not mask.noise[:, 0].any()
    assert mask.noise[:, -1].all()
    # A span begins where noise begins: none touches another.
    before = np.pad(mask.noise, ((0, 0), (1, 0)))[:, :-1]
    np.testing.assert_array_equal(mask.starts, mask.noise & ~before)


@given(lengths, corruptions, seeds)
def test_the_text_comes_back_and_sentinels_are_in_order(length, corruption, seed):
    text = philox_generator(seed, 1).random_raw(2 * length).reshape(2, length) % np.uint64(1000)
    mask = masks(length, corruption, seed, rows=2)
    noise, spans = noise_counts(length, corruption)
    encoder, decoder = apply_span_mask(text, mask, SENTINELS)
    encoder, decoder = encoder.reshape(2, -1), decoder.reshape(2, -1)
    assert (encoder.shape[1] + 1, decoder.shape[1] + 1) == corrupted_lengths(length, corruption)
    for row in range(2):
        for side in (encoder[row], decoder[row]):
            np.testing.assert_array_equal(side[side > 4000], SENTINELS[:spans])
        assert decoder[row, 0] == SENTINELS[0]
        assert (decoder[row] < 4000).sum() == noise
        np.testing.assert_array_equal(restore(encoder[row], decoder[row], SENTINELS), text[row])


def test_spans_that_touch_keep_a_sentinel_each():
    text = np.array([[1, 2, 3, 4, 5]])
    mask = SpanMask(np.array([[0, 1, 1, 1, 0]], bool), np.array([[0, 1, 0, 1, 0]], bool))
    encoder, decoder = apply_span_mask(text, mask, SENTINELS)
    assert encoder.tolist() == [1, 5000, 4999, 5]
    assert decoder.tolist() == [5000, 2, 3, 4999, 4]
    assert restore(encoder, decoder, SENTINELS).tolist() == [1, 2, 3, 4, 5]


def test_an_unwritten_sentinel_restores_nothing():
    assert restore(np.array([1, 5000, 2, 4999]), np.array([7, 4999, 3]), SENTINELS).tolist() == [1, 2, 3]


def test_every_way_to_cut_is_equally_likely():
    corruption = Corruption(0.5, 2)  # 8 tokens: 4 of noise in 2 spans, 3 ways each
    mask = masks(8, corruption, 5, rows=9000)
    ways, counts = np.unique(mask.noise, axis=0, return_counts=True)
    assert len(ways) == 9
    assert abs(counts - 1000).max() < 5 * 30


@given(st.integers(1, 300), st.integers(1, 12), st.floats(0.05, 0.5), st.booleans(), seeds)
def test_ngram_spans_stay_within_their_budget(length, longest, density, whole, seed):
    text = philox_generator(seed, 1).random_raw(length) % np.uint64(7)
    begins = np.arange(7) < 4
    units = unit_boundaries(text, (begins, begins) if whole else None)
    budget, most = max(1, round(length * density)), 40
    spans = SpanLengthDistribution.geometric(longest, 5.0)
    mask = ngram_span_mask(philox_generator(seed, 2), units, spans, budget, most)
    again = ngram_span_mask(philox_generator(seed, 2), units, spans, budget, most)
    np.testing.assert_array_equal(mask.noise, again.noise)
    assert 1 <= mask.noise.sum() <= budget
    assert 1 <= mask.starts.sum() <= most
    assert (mask.noise | ~mask.starts).all()
    if not whole and budget < most:
        assert mask.noise.sum() == budget
    edges = np.flatnonzero(mask.noise & ~np.pad(mask.noise, (1, 0))[:-1])
    if whole and not (mask.noise.sum() == 1 and np.diff(units).min() > budget):
        assert set(edges) <= set(units.tolist()) or mask.noise.sum() == 1
    encoder, decoder = apply_span_mask(text[None], SpanMask(mask.noise[None], mask.starts[None]), SENTINELS)
    np.testing.assert_array_equal(restore(encoder, decoder, SENTINELS), text)


@given(st.integers(2, 100), st.floats(0.0, 0.95), st.floats(0.05, 0.5), seeds)
def test_ngram_spans_leave_out_what_is_kept(length, share, density, seed):
    kept = philox_generator(seed, 1).random_raw(length) < share * 2.0**64
    kept[seed % length] = False
    budget = max(1, round((~kept).sum() * density))
    spans = SpanLengthDistribution.geometric(10, 5.0)
    mask = ngram_span_mask(philox_generator(seed, 2), np.arange(length + 1), spans, budget, budget, kept)
    assert mask.noise.sum() == budget
    assert not (mask.noise & kept).any()
    assert (mask.noise | ~mask.starts).all()


@pytest.mark.parametrize(("mean", "longest", "left"), [(5.0, 10, 4.463), (20.0, 10, 8.025), (3.0, 1000, 3.0)])
def test_what_a_cut_leaves_of_a_mean(mean, longest, left):
    assert clipped_geometric_mean(mean, longest) == pytest.approx(left, abs=1e-3)
    bounds = SpanLengthDistribution.geometric(longest, mean).cdf
    chances = np.diff(bounds, prepend=0.0)
    assert clipped_geometric_mean(mean, longest) == pytest.approx((chances * np.arange(1, longest + 1)).sum())


def test_span_lengths_follow_their_distribution():
    draws = philox_generator(3, 0).random_raw(40_000)

    def shares(lengths: SpanLengthDistribution) -> np.ndarray:
        return np.bincount([lengths.draw(word) for word in draws], minlength=5)[1:] / len(draws)

    np.testing.assert_allclose(shares(SpanLengthDistribution.geometric(4, 5.0)), [0.2, 0.16, 0.128, 0.512], atol=0.01)
    harmonic = np.array([12, 6, 4, 3]) / 25
    np.testing.assert_allclose(shares(SpanLengthDistribution.harmonic(4, longer_first=False)), harmonic, atol=0.01)
    np.testing.assert_allclose(shares(SpanLengthDistribution.harmonic(4, longer_first=True)), harmonic[::-1], atol=0.01)
    assert {SpanLengthDistribution.geometric(3, 1.0).draw(word) for word in draws[:50]} == {1}


def test_words_are_found_in_bytes_and_pieces():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("a_1 é, b")
    edges = token_word_edges([tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size)])
    assert unit_boundaries(ids, edges).tolist() == [0, 3, 4, 6, 7, 8, 9]
    pieces = token_word_edges([b" the", b"re", b" is", b"", b"s"])
    assert unit_boundaries(np.array([0, 1, 2, 3, 4, 4]), pieces).tolist() == [0, 2, 3, 4, 6]


def test_sentinel_ids_are_those_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.ByT5Tokenizer(), with_sentinels(ByteTokenizer(), None)
    assert ours.vocab_size == len(theirs) == 384
    assert sentinel_ids(ours).tolist() == theirs.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(125)])
    assert tokenizer_from_dict(json.loads(json.dumps(ours.to_dict()))).to_dict() == ours.to_dict()
    assert ours.decode(np.append(ours.encode("aé"), sentinel_ids(ours))) == "aé"
    assert ours.token_byte_counts().sum() == 256
    assert with_sentinels(ours, 10) is ours
    assert with_sentinels(ByteTokenizer(), 3).vocab_size == 262


def test_sentinels_of_a_file_count_down_to_its_last_id():
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    plain = build_json_tokenizer(canonical_json(library.to_str()), {})
    with_them = with_sentinels(plain, None)
    assert sentinel_ids(with_them).tolist() == list(range(102, 2, -1))
    assert with_them.vocab_size == 103
    assert with_sentinels(with_them, None) is with_them  # its own are kept
    kept = tokenizer_from_dict(json.loads(json.dumps(with_them.to_dict())))
    assert sentinel_ids(kept).tolist() == sentinel_ids(with_them).tolist()
    assert find_mask_token_id(with_them) == 102
    assert find_mask_token_id(plain) is None
    with pytest.raises(UserError, match="char"):
        with_sentinels(CharTokenizer("ab"), None)


@pytest.mark.parametrize("wrong", [-1, True, "3", 10**6, 1.5])
def test_a_document_with_a_wrong_number_of_sentinels_is_refused(wrong):
    with pytest.raises(ValueError, match="sentinels"):
        tokenizer_from_dict({"tokenizer": "byte-level", "sentinels": wrong})
