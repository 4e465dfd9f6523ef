"""Rules of what is learnt: families and their tasks, lengths that fit, sentinels, keys that change nothing."""

from __future__ import annotations

import pytest
from config_helpers import load, problems
from tiers import looped

from stoker.trainer.config.data_task import Task, task_from_keys

T5 = ("model=t5_tiny", "model.seq_length=512")
BERT = ("model=bert_tiny",)
DATA, TYPE = "model.data.", "model.data.dataset_type"
SFT_MOCK = ("data=mock", f"{TYPE}=sft")
T5_PIECES = (*T5, "data=mmap", "model.data.data_prefix=x", "model.data.respect_document_boundaries=true")


@looped(
    ("overrides", "key", "says"),
    [
        (["model.data.dataset_type=t5"], TYPE, "`family: gpt` supports gpt"),
        ([*T5, "model.data.dataset_type=bert"], TYPE, "supports t5, t5_prefix_lm, seq2seq"),
        ([*BERT, "model.data.dataset_type=gpt"], TYPE, "supports bert"),
        ([*T5, "model.data.dataset_type=seq2seq"], TYPE, "`data_impl: pystd` does not have"),
        (
            [*T5, "model.data.data_impl=pystd_docstring", f"{TYPE}=t5"],
            DATA + "data_impl",
            "`dataset_type: t5` does not support",
        ),
        (["model.data.dataset_type=sft"], TYPE, "`data_impl: pystd` does not have"),
        ([*T5, "data=jsonl", "model.data.path=null"], DATA + "path", "`data_impl: jsonl` needs a file"),
        ([*T5, "model.data.seq_length_dec=100"], DATA + "seq_length_dec", "must be at least 114"),
        ([*T5, "model.data.masked_lm_prob=0.4", "model.data.seq_length_dec=128"], DATA + "seq_length_dec", "at least"),
        (
            [*T5, "model.data.geometric_dist=true", "model.data.seq_length_dec=78"],
            DATA + "seq_length_dec",
            "at least 79",
        ),
        ([*T5, "model.data.dataset_type=ul2"], TYPE, "use t5, or t5_prefix_lm"),
        ([*T5, "model.data.permutation=true"], DATA + "permutation", "not a supported objective"),
        ([*T5, "model.data.masked_lm_prob=1.5"], DATA + "masked_lm_prob", "< 1"),
        ([*T5, "tokenizer=char"], "model.tokenizer.library", "no eos token"),
        ([*T5, "model.tokenizer.num_sentinel_tokens=20"], "model.tokenizer.num_sentinel_tokens", "28 masked spans"),
        (
            ["model=t5_tiny", "model.seq_length=4096"],
            "model.tokenizer.num_sentinel_tokens",
            "125 sentinels are too few",
        ),
        (["model=t5_tiny", "model.seq_length=3"], TYPE, "samples of at least 4 tokens, not 3"),
        (
            [*T5, "model.encoder.position_embedding_type=learned_absolute", "model.data.seq_length=1024"],
            DATA + "seq_length",
            "must equal `seq_length` (512)",
        ),
    ],
)
def test_refused(overrides: list[str], key: str, says: str) -> None:
    found = problems(*overrides)
    assert says in found[key].rule, found[key].rule


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["model.data.dataset_type=t5"], "model=t5_small"),
        ([*T5, "model.data.dataset_type=gpt"], "model=gpt_125m"),
        ([*T5, "model.data.dataset_type=bert"], "model=bert_base"),
    ],
)
def test_the_family_that_learns_a_task_is_named(overrides: list[str], fix: str) -> None:
    assert fix in problems(*overrides)[TYPE].fix


def test_the_cure_for_pairs_is_one_that_the_family_has() -> None:
    pairs = "model.data.data_impl=pystd_docstring"
    assert f"{TYPE}=seq2seq" in problems(*T5, pairs, f"{TYPE}=t5")[DATA + "data_impl"].fix
    assert f"{TYPE}=sft" in problems(pairs, f"{TYPE}=gpt")[DATA + "data_impl"].fix
    assert "seq2seq" not in problems(*BERT, pairs)[DATA + "data_impl"].fix


@looped(
    ("overrides", "key"),
    [
        ([*T5, "model.data.max_ngram_size=5"], "max_ngram_size"),
        ([*T5, "model.data.whole_word_masking=false"], "whole_word_masking"),
        ([*T5, "model.data.geometric_dist=true", "model.data.favor_longer_ngrams=true"], "favor_longer_ngrams"),
        ([*T5, "model.data.geometric_dist=false", "model.data.mean_ngram_size=4.0"], "mean_ngram_size"),
        ([*T5, "model.data.packed_sequence=true"], "packed_sequence"),
        ([*T5, "model.data.short_seq_prob=0.1"], "short_seq_prob"),
        ([*T5, "data=mock", "model.data.geometric_dist=true"], "geometric_dist"),
        ([*T5, "model.data.eod_mask_loss=true"], "eod_mask_loss"),
        ([*T5, "model.data.reset_attention_mask=true"], "reset_attention_mask"),
        ([*T5, "data=docstring", "model.data.masked_lm_prob=0.3"], "masked_lm_prob"),
        ([*T5, "data=docstring", "model.data.respect_document_boundaries=true"], "respect_document_boundaries"),
        ([*T5, "model.data.label_key=x"], "label_key"),
        ([*BERT, "model.data.mean_ngram_size=4.0"], "mean_ngram_size"),
        ([*BERT, "model.data.seq_length_dec=64"], "seq_length_dec"),
        ([*BERT, "model.data.packed_sequence=true"], "packed_sequence"),
        (["model.data.masked_lm_prob=0.3"], "masked_lm_prob"),
        ([*SFT_MOCK, "model.data.packed_sequence=true"], "packed_sequence"),
        ([*T5_PIECES, "model.data.shuffle_documents=false"], "shuffle_documents"),
        ([*T5_PIECES, "model.data.index_mapping_dir=x"], "index_mapping_dir"),
    ],
)
def test_a_key_without_effect_is_told(overrides: list[str], key: str) -> None:
    warned = [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"]
    assert warned == [DATA + key]


@looped(
    "overrides",
    [
        T5,
        BERT,
        [*T5, "data=mock"],
        [*BERT, "data=mock"],
        [*T5, "data=docstring", "model.data.packed_sequence=true"],
        T5_PIECES,
        [*T5, "data=mmap", "model.data.data_prefix=x", "model.data.shuffle_documents=false"],
        [*T5, "model.data.respect_document_boundaries=true", "model.data.packed_sequence=true"],
        [*T5, "model.data.geometric_dist=true", "model.data.max_ngram_size=10", "model.data.mean_ngram_size=4.0"],
        [*T5, "model.data.dataset_type=t5_prefix_lm", "model.data.seq_length_dec=64"],
        [*T5, "model.data.seq_length_dec=114"],
        ["experiment=t5_pystd"],
        ["experiment=t5_docstring"],
        ["experiment=t5_docstring", "model=t5_tiny", "trainer=cpu"],
        ["experiment=t5_pystd", "model=t5_tiny", "trainer=cpu", "model.seq_length=256", "model.micro_batch_size=16"],
    ],
)
def test_what_acts_is_not_warned_of(overrides: list[str]) -> None:
    assert not [finding for finding in load(*overrides).findings if finding.level != "info"]


@pytest.mark.parametrize(
    ("family", "mean", "longest", "level", "left"),
    [
        (T5, 20, 10, "warning", "reduces it to 8.03 (model.data.max_ngram_size=45 keeps 90 % of it)"),
        (BERT, 4, 3, "warning", "reduces it to 2.31"),
        (T5, 1000, 50, "warning", "reduces it to 48.8 (model.data.max_ngram_size=1000)"),
        (T5, 8, 10, "info", "reduces it to 5.9"),
        (T5, 4, 10, "", ""),
        (T5, 1, 1, "", ""),
        ([*T5, "data=mock"], 20, 10, "", ""),  # which has T5's spans
    ],
)
def test_a_mean_that_is_cut_is_told(family: list[str], mean: int, longest: int, level: str, left: str) -> None:
    keys = f"geometric_dist=true mean_ngram_size={mean} max_ngram_size={longest}".split()
    findings = [
        finding
        for finding in load(*family, *(f"{DATA}{key}" for key in keys)).findings
        if finding.keys[0] == DATA + "mean_ngram_size"
    ]
    assert [finding.level for finding in findings] == [level] * bool(level)
    assert all(left in f"{finding.message} ({finding.fix})" for finding in findings)


def test_places_that_stay_empty_are_told() -> None:
    (finding,) = load(*T5, "model.data.seq_length_dec=128").findings
    assert ("adds 14 padding tokens" in finding.message, finding.fix) == (True, "~model.data.seq_length_dec")


def test_places_that_the_ranks_need_are_not_told() -> None:
    ranks = [*T5, "trainer.devices=4", "model.context_parallel_size=4"]
    assert problems(*ranks)["model.context_parallel_size"].fix.endswith("model.data.seq_length_dec=120")
    assert not load(*ranks, "model.data.seq_length_dec=120").findings
    (finding,) = load(*ranks, "model.data.seq_length_dec=128").findings
    assert "needs 114, 120 to be a multiple of 8" in finding.message
    assert finding.fix == "model.data.seq_length_dec=120"


def task(*overrides: str) -> Task:
    return task_from_keys(load(*overrides).root.model)


def test_the_lengths_of_a_task() -> None:
    plain = task(*T5)
    assert (plain.name, plain.length, plain.decoder_length, plain.window) == ("t5", 512, 114, 568)
    assert not plain.packed
    assert not plain.padded
    ngrams = task(*T5, "model.data.geometric_dist=true")
    assert (ngrams.length, ngrams.window, ngrams.padded) == (512, 511, True)
    assert ngrams.decoder_length == 2 * 77 + 1  # 15 % of 511, each with a sentinel, and the end
    assert task(*T5, "model.data.dataset_type=t5_prefix_lm").decoder_length == 512
    assert task(*T5, "data=docstring").decoder_length == 128
    assert task(*T5, "data=docstring").padded
    packed = task(*T5, "data=docstring", "model.data.packed_sequence=true")
    assert (packed.packed, packed.padded) == (True, False)
    assert (task(*BERT).decoder_length, task(*BERT).window) == (0, 128)
    assert task("model=gpt_tiny").name == "gpt"


def test_a_nemo_file_of_t5_draws_nemos_spans() -> None:
    keys = "masked_lm_prob=0.15 short_seq_prob=0.0 max_ngram_size=10 mean_ngram_size=null geometric_dist=true"
    more = "permutation=false whole_word_masking=true favor_longer_ngrams=false respect_document_boundaries=true"
    data = [f"model.data.{key}" for key in f"dataset_type=t5 seq_length_dec=128 {keys} {more}".split()]
    config = load(*T5, *data, "model.tokenizer.num_sentinel_tokens=100")
    assert not [finding for finding in config.findings if finding.level == "warning"]
    found = task_from_keys(config.root.model)
    assert found.corruption is not None
    assert (found.decoder_length, found.corruption.mean_span_length, found.padded) == (128, 5.0, True)
