"""Text generation of a T5, and how `stoker evaluate` scores it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import full_only

from stoker.models.t5 import T5
from stoker.trainer.cli import main
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.data.datasets.seq2seq import PairShape
from stoker.trainer.data.sources.text_pairs import TextPair
from stoker.trainer.data.tasks.sentinels import encode_with_sentinels, sentinel_ids, with_sentinels
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.evaluation.answer_scores import generate_answers, score_pairs
from stoker.trainer.generation import text_generator
from stoker.trainer.generation.sampling import TextStreamer
from stoker.trainer.generation.text_generator import Generator, StoppingCriteria
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

STACK = {
    "num_layers": 1,
    "hidden_size": 48,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "normalization": "rmsnorm",
    "bias": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "position_embedding_type": "relative",
}
PAIRS = [("def one(): ...", "Say one."), ("def two_words(): ...", "Two words."), ("def three(): ...", "A third text.")]


def config(folder: Path, steps: int, **data: Any) -> RunConfig:
    document = {
        "trainer": {"accelerator": "cpu", "max_steps": steps, "limit_val_batches": 0, "enable_model_summary": False},
        "exp_manager": {"explicit_log_dir": str(folder / "run"), "create_tensorboard_logger": False},
        "model": {
            "family": "t5",
            "seq_length": 24,
            "encoder": STACK,
            "decoder": STACK,
            "micro_batch_size": 3,
            "global_batch_size": 3,
            "data": {"dataset_type": "seq2seq", "seq_length_dec": 16, **data},
            "optim": {"lr": 1e-2, "sched": {"warmup_steps": 5}},
        },
    }
    return RunConfig(RootBlock.model_validate(document), document=document)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt its three pairs by heart."""
    folder = tmp_path_factory.mktemp("trained")
    pairs = folder / "pairs"
    pairs.mkdir()
    lines = "".join(json.dumps({"input": source, "output": target}) + "\n" for source, target in PAIRS)
    (pairs / "train.jsonl").write_text(lines)
    (pairs / "test.jsonl").write_text(lines.replace("A third", "Another"))
    run_training(config(folder, 120, data_impl="jsonl", path=str(pairs)))
    return folder


def test_answers_are_the_most_probable_tokens(trained: Path) -> None:
    restored = load_model(trained / "run", "cpu")
    model, tokenizer = restored.model, restored.tokenizer
    assert isinstance(model, T5)
    shape = PairShape(24, 16, 0)
    inputs = [pair[0] for pair in PAIRS] + ["x", "def two_words(): ... and much more than fits in"]
    found = generate_answers(restored, inputs, shape, 3)
    assert found[:3] == [pair[1] for pair in PAIRS]
    one, five = (generate_answers(restored, inputs, shape, batch_size) for batch_size in (1, 5))
    assert found == one == five, "whatever is read together"
    for text, answer in zip(inputs, found, strict=True):
        read = torch.tensor([[*tokenizer.encode(text)[:23].tolist(), 1]])
        written = [0]
        with torch.no_grad():
            while len(written) <= 16 and written[-1] != 1:
                logits = model(read, torch.tensor([written]))
                written.append(int(logits[0, -1].argmax()))
        assert answer == tokenizer.decode(written)


def test_sentinels_are_read_and_written_by_name() -> None:
    tokenizer = with_sentinels(ByteTokenizer(), None)
    first, second = sentinel_ids(tokenizer)[:2].tolist()
    a, b = tokenizer.encode("ab").tolist()
    assert encode_with_sentinels(tokenizer, "a<extra_id_1>b<extra_id_0>") == [a, second, b, first]
    for text in ("<extra_id_999>", f"<extra_id_{'9' * 5000}>"):
        assert encode_with_sentinels(tokenizer, text) == tokenizer.encode(text).tolist()
    stream = TextStreamer(tokenizer, token_names={first: "<extra_id_0>"})
    half_character = tokenizer.encode("\u00e9").tolist()[:1]
    text = "".join(stream.put(token) for token in [a, *half_character, first, b]) + stream.close()
    assert text == "a\ufffd<extra_id_0>b"


def test_generate_answers_with_the_names_of_sentinels(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []
    tokenizer = load_model(trained / "run", "cpu").tokenizer
    ids = sentinel_ids(tokenizer).tolist()
    assert tokenizer.eos_id is not None
    following: list[int] = [ids[0], *tokenizer.encode("x").tolist(), tokenizer.eos_id]

    def run(_: Any, prompts: list[list[int]], seeds: list[int]) -> Iterator[list[int]]:
        assert seeds == [0]
        read.extend(prompts)
        yield from ([token] for token in following)

    monkeypatch.setattr(text_generator.DecodeLoop, "generate", run)
    monkeypatch.setattr(text_generator.DecodeLoop, "finish_row", lambda *_: None)
    assert main.main(["generate", "--checkpoint", str(trained / "run"), "--prompt", "<extra_id_2>"]) == 0
    assert read == [[ids[2], tokenizer.eos_id]]
    assert capsys.readouterr().out == "<extra_id_0>x\n"


def test_a_prompt_that_a_model_cannot_read_is_told(trained: Path) -> None:
    restored = load_model(trained / "run", "cpu")
    assert isinstance(restored.model, T5)
    restored.model.max_positions = (24, None)  # as with learned positions
    generator = Generator.from_restored(restored)
    generator.generate([[5] * 24], StoppingCriteria(2))
    with pytest.raises(UserError, match="25 tokens including eos, and this T5 supports at most 24"):
        generator.generate([[5] * 24, [5] * 25], StoppingCriteria(2))


def test_scores_of_answers(trained: Path) -> None:
    restored = load_model(trained / "run", "cpu")
    pairs = [TextPair(*pair) for pair in PAIRS]
    scores = score_pairs(restored, pairs, batch_size=2)
    assert (scores.model.exact_match, scores.model.rouge_l, scores.model.texts) == (1.0, 1.0, 3)
    assert scores.copied_name is None, "only functions of the standard library have one"
    assert score_pairs(restored, pairs, 2, limit=2).model.texts == 2


@full_only
def test_evaluate_prints_them(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate = ["evaluate", "--checkpoint", str(trained / "run"), "--device", "cpu"]
    assert main.main([*evaluate, "--split", "test", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact_match"] == pytest.approx(2 / 3)
    assert document["rouge_l"] == pytest.approx((1 + 1 + 2 * 1 / 5) / 3)
    assert document["texts"] == 3
    assert document["copied_name"] is None
    other = trained / "other.jsonl"
    other.write_text(json.dumps({"input": PAIRS[0][0], "output": PAIRS[0][1]}) + "\n")
    command = [*evaluate, "--data-path", str(other)]
    assert main.main(command) == 0
    said = capsys.readouterr().out
    assert "exact match    1.0000 over 1 texts" in said
    assert "ROUGE-L        1.0000" in said
    other.write_text("")
    assert main.main(command) == 2
    assert "--data-path" in capsys.readouterr().err


def test_docstrings_are_scored_beside_the_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restored = load_model(trained / "run", "cpu")
    root = restored.config.root
    data = root.model.data.model_copy(update={"data_impl": "pystd_docstring"})
    changed = root.model_copy(update={"model": root.model.model_copy(update={"data": data})})
    restored = replace(restored, config=replace(restored.config, root=changed))
    scores = score_pairs(restored, [TextPair(*pair) for pair in PAIRS], batch_size=3)
    assert scores.copied_name is not None
    assert scores.copied_name.exact_match == pytest.approx(1 / 3)
    assert "function's name: 0.3333" in "\n".join(scores.report_lines())
    document = scores.to_dict()
    assert document["copied_name"] == {"exact_match": 1 / 3, "rouge_l": scores.copied_name.rouge_l, "texts": 3}
