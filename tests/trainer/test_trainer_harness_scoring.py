"""Scores of continuations are those of transformers, whatever goes through the model together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_folders import TOKENS, VOCAB, random_model, save
from hypothesis import given
from hypothesis import strategies as st
from tiers import cases

from stoker.models.bert import BERT
from stoker.models.gpt import GPT
from stoker.models.moe.router import Router
from stoker.trainer.cli.main import main
from stoker.trainer.conversion.load_model import LoadedModel, load_model
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from stoker.trainer.data.tokenizers.tokenizer_json import build_json_tokenizer, canonical_json
from stoker.trainer.evaluation.harness.loglikelihood import LoglikelihoodScorer, Request, Score, rolling_windows
from stoker.trainer.utils.errors import EXIT_OK

BYTES = ("--tokenizer", "byte-level")


def both(name: str, folder: Path) -> tuple[transformers.PreTrainedModel, LoadedModel]:
    """A random model of transformers', and the same one converted."""
    theirs = random_model(name)
    save(theirs, folder / "theirs")
    assert main(["convert", str(folder / "theirs"), str(folder / "ours"), *BYTES]) == EXIT_OK
    return theirs, load_model(folder / "ours", "cpu")


def scorer(restored: LoadedModel, longest: int = TOKENS, batch_size: int | None = None) -> LoglikelihoodScorer:
    return LoglikelihoodScorer(
        restored.model,
        restored.tokenizer,
        restored.precision,
        restored.device,
        longest=longest,
        batch_size=batch_size,
    )


def some_requests(seed: int = 0) -> list[Request]:
    """Of many lengths; some have the same question and answers of one token, one is longer than the model reads."""
    chance = random.Random(seed)

    def drawn(count: int) -> list[int]:
        return [chance.randrange(3, VOCAB) for _ in range(count)]

    requests = [Request(drawn(chance.randint(1, 9)), drawn(chance.randint(1, 9))) for _ in range(9)]
    question = drawn(6)
    requests += [Request(question, drawn(1)) for _ in range(3)]
    requests += [Request(question[:3], [*question[3:], 7])]  # the same input, scored from another place
    requests += [Request(drawn(TOKENS + 5), drawn(3)), Request(drawn(2), drawn(TOKENS))]
    chance.shuffle(requests)
    return requests


def reference(model: transformers.PreTrainedModel, request: Request, longest: int = TOKENS) -> tuple[float, bool]:
    """One request at a time, in transformers, log-probabilities in fp64."""
    context, continuation = list(request.context), list(request.continuation)
    called: Any = model
    labels = torch.tensor(continuation)
    if model.config.is_encoder_decoder:
        read, written = torch.tensor([context[-longest:]]), torch.tensor([[0, *continuation[:-1]]])
        logits = called(input_ids=read, decoder_input_ids=written).logits[0]
    else:
        read = torch.tensor([(context + continuation)[-longest - 1 : -1]])
        logits = called(input_ids=read).logits[0, -len(continuation) :]
    logs = logits.double().log_softmax(-1)
    return logs[range(len(labels)), labels].sum().item(), bool((logits.argmax(-1) == labels).all())


@torch.no_grad()
def with_greedy(model: transformers.PreTrainedModel, requests: list[Request]) -> list[Request]:
    """The requests, one whose continuation is what the model would write itself, and one where only its end is."""
    called: Any = model

    def written(tokens: list[int]) -> list[int]:
        return [*tokens, int(called(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())]

    start = list(requests[0].context)[:4]
    one, two = written(written(start)), written([*start, 3 + (written(start)[-1] + 1) % 300])
    return [*requests, Request(start, one[len(start) :]), Request(start, two[len(start) :])]


@pytest.mark.parametrize("name", cases(["llama", "mistral", "gpt2", "t5_v1_0", "byt5"], fast=2))
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, restored = both(name, tmp_path)
    requests = some_requests()
    if not theirs.config.is_encoder_decoder:
        requests = with_greedy(theirs, requests)
    longest = min(TOKENS, restored.context_length)
    with torch.no_grad():
        wanted = [reference(theirs, request, longest) for request in requests]
    assert any(greedy for _, greedy in wanted) == (not theirs.config.is_encoder_decoder)
    counted: list[int] = []
    for batch_size in (None, 1, 4):
        found = scorer(restored, longest, batch_size).score(requests, counted.append)
        for score, (log_probability, is_greedy) in zip(found, wanted, strict=True):
            assert score.log_probability == pytest.approx(log_probability, rel=2e-6, abs=1e-5)
            assert score.is_greedy == is_greedy
    assert sum(counted) == 3 * len(requests)


def test_the_same_input_goes_through_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, restored = both("llama", tmp_path)
    rows: list[int] = []
    hidden_states = GPT.hidden_states

    def counted(self: GPT, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(tokens.shape[0])
        return hidden_states(self, tokens, *rest)

    monkeypatch.setattr(GPT, "hidden_states", counted)
    requests = [Request([5, 6, 7], [answer]) for answer in (8, 9, 10, 11)]
    scorer(restored).score([*requests, Request([5], [6, 7, 8]), Request([5, 6], [9])])
    assert sum(rows) == 2


def assert_scores_agree(scores: list[Score], expected: list[Score]) -> None:
    """Equal but for sums of fp32 in another order, which depends on the number of threads."""
    for score, other in zip(scores, expected, strict=True):
        assert score.log_probability == pytest.approx(other.log_probability, rel=2e-6, abs=1e-5)
        assert score.is_greedy == other.is_greedy


def test_an_expert_with_a_capacity_sees_one_text_at_a_time(tmp_path: Path) -> None:
    """Such an expert drops tokens depending on what is beside a text."""
    _, restored = both("mixtral", tmp_path)
    requests = some_requests()
    for module in restored.model.modules():
        if isinstance(module, Router):
            module.capacity_factor = 0.6
    alone = [scorer(restored).score([request])[0] for request in requests]
    assert_scores_agree(scorer(restored, batch_size=8).score(requests), alone)


def test_logits_are_made_of_scored_tokens_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.models import language_model
    from stoker.trainer.evaluation.harness import loglikelihood

    _, restored = both("llama", tmp_path)
    made: list[int] = []
    logits_of = language_model.token_logits

    def counted(hidden: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        made.append(hidden.shape[0])
        return logits_of(hidden, *rest, **more)

    monkeypatch.setattr(language_model, "token_logits", counted)
    requests = some_requests()
    whole = scorer(restored).score(requests)
    assert sum(made) == sum(len(request.continuation) for request in requests)
    monkeypatch.setattr(loglikelihood, "_LOGITS_AT_ONCE", 3 * 512)
    made.clear()
    chunked = scorer(restored).score(requests)
    assert max(made) == 3
    assert_scores_agree(chunked, whole)


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    _, restored = both("llama", tmp_path)
    for request, says in (
        (Request([], [3]), "must have at least one token each"),
        (Request([3], []), "must have at least one token each"),
        (Request([3], [4] * (TOKENS + 1)), f"has {TOKENS + 1} tokens, more than the context length {TOKENS}"),
    ):
        with pytest.raises(ValueError, match=says):
            scorer(restored).score([request])
    for arguments in ({"longest": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            scorer(restored, **arguments)
    bert: Any = BERT.__new__(BERT)
    with pytest.raises(ValueError, match=r"`model` \(BERT\) must be a GPT or a T5"):
        LoglikelihoodScorer(bert, restored.tokenizer, restored.precision, restored.device, longest=4)
    assert scorer(restored).score([]) == []


@given(length=st.integers(0, 40), longest=st.integers(1, 12))
def test_windows_score_each_token_once_after_as_much_as_there_is_room_for(length: int, longest: int) -> None:
    tokens = list(range(length))
    windows = list(rolling_windows(tokens, -1, longest))
    assert [token for window in windows for token in window.continuation] == tokens
    for context, continuation in windows:
        read = [*context, *continuation]
        assert read == list(range(read[0], continuation[-1] + 1))
        assert len(read) - 1 == min(longest, length)


def test_windows_are_the_harnesss() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for length in range(30):
        for longest in range(1, 9):
            theirs = utils.get_rolling_token_windows(list(range(length)), -1, longest, 1)
            wanted = [tuple(map(list, utils.make_disjoint_window(pair))) for pair in theirs]
            ours = rolling_windows(range(length), -1, longest)
            assert [(list(window.context), list(window.continuation)) for window in ours] == wanted


def test_a_text_starts_as_its_tokenizer_says() -> None:
    import tokenizers
    from tokenizers import processors

    model = tokenizers.models.BPE(vocab={"a": 0, "b": 1, "<s>": 2, "</s>": 3}, merges=[])
    library = tokenizers.Tokenizer(model)
    library.add_special_tokens(["<s>", "</s>"])
    assert build_json_tokenizer(canonical_json(library.to_str()), {}).document_start_ids() == []
    for single, around in (("<s> $A", ([2], [])), ("$A </s>", ([], [3])), ("<s> $A </s>", ([2], [3]))):
        specials = [("<s>", 2), ("</s>", 3)]
        library.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
        tokenizer = build_json_tokenizer(canonical_json(library.to_str()), {})
        assert tokenizer.post_processor_tokens() == around
        assert tokenizer.document_start_ids() == around[0]
    assert ByteTokenizer().document_start_ids() == [1]
    assert CharTokenizer("ab").document_start_ids() == []
