import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpt_builder import build_gpt
from resolved import build_data
from tiers import cases
from tiny_run import tiny_config
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.trainer.checkpoint.reader import OPTIMIZER, WEIGHTS, RunState
from stoker.trainer.checkpoint.writer import CheckpointContent, write_checkpoint
from stoker.trainer.cli import evaluate as evaluate_command
from stoker.trainer.cli import generate as generate_command
from stoker.trainer.config.load import config_from_document
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.data.datasets.samples import EvaluationWindows
from stoker.trainer.data.sources.indexed_tokens import IndexedWriter
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from stoker.trainer.evaluation.baselines import unigram_bits_per_byte, xz_bits_per_byte
from stoker.trainer.evaluation.held_out_loss import EvaluationResult, evaluate
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError
from stoker.trainer.utils.local_shard import local_shard
from stoker.trainer.utils.safetensors_io import write_json


def _bigram_loss(table: Tensor):
    """The loss of a model whose logits are a row of a table."""
    return lambda tokens, labels: F.cross_entropy(table[tokens].flatten(0, 1), labels.flatten(), reduction="sum")


def test_uniform_model_costs_log_vocabulary() -> None:
    text = "äb" * 50
    tokenizer = ByteTokenizer()
    samples = EvaluationWindows(tokenizer.encode(text), 8)
    uniform = _bigram_loss(torch.zeros(259, 259, dtype=torch.float64))
    result = evaluate(uniform, samples, token_bytes=tokenizer.token_byte_counts(), batch_size=3)
    assert result.tokens == result.bytes == 149
    assert result.loss == pytest.approx(math.log(259))
    assert result.perplexity == pytest.approx(259)
    assert result.bits_per_byte == pytest.approx(math.log2(259))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_loss_does_not_depend_on_batches(batch_size: int) -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stream = np.random.default_rng(0).integers(0, 5, 203)
    result = evaluate(
        _bigram_loss(table), EvaluationWindows(stream, 16), token_bytes=np.ones(5, np.int64), batch_size=batch_size
    )
    whole = torch.from_numpy(stream)
    assert result.loss == pytest.approx(F.cross_entropy(table[whole[:-1]], whole[1:]).item(), rel=1e-12)


def test_bits_per_byte_counts_bytes_not_tokens() -> None:
    tokenizer = CharTokenizer("aé\u20ac")
    stream = tokenizer.encode("aé\u20ac" * 10)
    result = evaluate(
        _bigram_loss(torch.zeros(3, 3)),
        EvaluationWindows(stream, 7),
        token_bytes=tokenizer.token_byte_counts(),
        batch_size=2,
    )
    assert (result.tokens, result.bytes) == (29, 59)
    assert result.bits_per_byte == pytest.approx(29 * math.log2(3) / 59)


def test_bits_per_byte_of_any_tokenizer_is_that_of_the_same_text() -> None:
    """Tokens that cost bits but stand for no bytes (eos) make it worse, as they should."""
    assert EvaluationResult(loss=math.log(2), tokens=12, bytes=10).bits_per_byte == pytest.approx(1.2)
    assert EvaluationResult(loss=1.0, tokens=12, bytes=0).bits_per_byte is None


def test_limit_batches() -> None:
    samples = EvaluationWindows(np.zeros(101, np.int64), 10)
    loss = _bigram_loss(torch.zeros(1, 1))
    ones = np.ones(1, np.int64)
    assert evaluate(loss, samples, token_bytes=ones, batch_size=3, limit_batches=2).tokens == 60
    assert evaluate(loss, samples, token_bytes=ones, batch_size=3, limit_batches=99).tokens == 100
    with pytest.raises(ValueError, match="`limit_batches`"):
        evaluate(loss, samples, token_bytes=ones, batch_size=3, limit_batches=0)


def test_document_has_no_infinity() -> None:
    document = EvaluationResult(loss=1e6, tokens=1, bytes=0).to_dict()
    assert document == {"loss": 1e6, "tokens": 1, "bytes": 0, "perplexity": None, "bits_per_byte": None}
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_unigram_baseline() -> None:
    train = b"aab"
    weights = np.array([3, 2, 1]) / 259
    assert unigram_bits_per_byte(train, b"a") == pytest.approx(-math.log2(weights[0]))
    assert unigram_bits_per_byte(train, b"abz") == pytest.approx(-np.log2(weights).mean())
    assert unigram_bits_per_byte(bytes(range(256)) * 9, b"any") == pytest.approx(8)


def test_xz_baseline() -> None:
    assert xz_bits_per_byte(b"a" * 100_000) < 0.02
    assert xz_bits_per_byte(np.random.default_rng(0).bytes(100_000)) == pytest.approx(8, abs=0.05)


# ---------------------------------------------------------------- a checkpoint on disk


def _write_run(path: Path, text: Path, fingerprint: str | None = None, **model: Any) -> tuple[Path, GPT]:
    """A run directory with one checkpoint of an untrained model, and that model."""
    config = config_from_document(
        {
            "model": {
                "family": "gpt",
                "num_layers": 2,
                "hidden_size": 16,
                "ffn_hidden_size": 32,
                "num_attention_heads": 2,
                "encoder_seq_length": 12,
                "micro_batch_size": 4,
                "init_method_std": 0.5,
                "data": {"data_impl": "text", "path": str(text), "splits_string": "70,15,15"},
                **model,
            }
        },
        trusted=True,
    )
    data = build_data(config.root)
    keys = config.root.model
    assert isinstance(keys, GPTKeys)
    gpt = build_gpt(
        keys,
        vocab_size=data.vocab_size,
        device="cpu",
        dtype=torch.float32,
        flags=AttentionFlags(),
        micro_batch_size=4,
    )
    state = RunState(
        step=7,
        consumed_samples=56,
        seed=1234,
        global_batch_size=8,
        micro_batch_size=4,
        sequence_length=12,
        precision="fp32",
        optimizer={},
        data_fingerprint=fingerprint or data.fingerprint,
        versions={"python": "3.10.0"},
    )
    write_checkpoint(
        path / "checkpoints",
        CheckpointContent(
            state,
            {WEIGHTS: {name: local_shard(p) for name, p in gpt.named_parameters()}, OPTIMIZER: {}},
            config.document,
            data.tokenizer.to_dict(),
        ),
    )
    return path, gpt.eval()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox äöü. " * 20)
    return path


def _run(command: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(arguments)))


@pytest.mark.parametrize("library", cases(["byte-level", "char"], fast=1))
def test_restored_model_is_the_saved_one(tmp_path: Path, text: Path, library: str) -> None:
    run, gpt = _write_run(tmp_path / "run", text, tokenizer={"library": library})
    restored = load_model(run, "cpu")
    tokens = torch.randint(restored.tokenizer.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(restored.model(tokens), gpt(tokens))
        assert not restored.model.training
    assert restored.context_length == 12
    for path in (run / "checkpoints", run / "checkpoints" / "step-7"):
        assert load_model(path, "cpu").path == run / "checkpoints" / "step-7"


def test_restore_on_a_cpu_forgets_what_was_wished_for_a_gpu(tmp_path: Path, text: Path) -> None:
    run, _ = _write_run(tmp_path / "run", text)
    path = run / "checkpoints" / "step-7" / "config.json"
    document = json.loads(path.read_text())
    document["model"] |= {"attention_backend": "sdpa_cudnn", "compile": True}
    document["trainer"]["precision"] = "bf16"
    _rewrite(path, json.dumps(document))
    restored = load_model(run, "cpu")
    assert next(restored.model.parameters()).dtype == torch.float32
    assert not restored.model.compiled


def _rewrite(path: Path, text: str) -> None:
    """Change a file of a checkpoint, and the manifest with it: what a forger would do."""
    path.write_text(text)
    manifest = path.parent / "manifest.json"
    document = json.loads(manifest.read_text())
    content = path.read_bytes()
    document["files"][path.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.unlink()
    write_json(manifest, document)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", '{"tokenizer": "char", "characters": "ba"}', "tokenizer.json: `characters` must be sorted"),
        ("tokenizer.json", "[]", "not a JSON object"),
        ("config.json", '{"model": {"_target_": "os.system"}}', "_target_"),
        ("config.json", '{"model": {"hidden_size": "big"}}', "hidden_size"),
        ("config.json", '{"model": {"hidden_size": 24}}', "does not fit the model"),
    ],
)
def test_forged_checkpoints_end_in_a_line(tmp_path: Path, text: Path, file: str, content: str, words: str) -> None:
    run, _ = _write_run(tmp_path / "run", text)
    _rewrite(run / "checkpoints" / "step-7" / file, content)
    with pytest.raises(UserError) as caught:
        load_model(run, "cpu")
    assert words in str(caught.value)


def test_no_checkpoint_or_device_is_a_user_error(tmp_path: Path, text: Path) -> None:
    with pytest.raises(UserError, match="nothing-here"):
        load_model(tmp_path / "nothing-here", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cpu"):
            load_model(tmp_path, "cuda")


def test_evaluate_command_gives_the_models_loss(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, gpt = _write_run(tmp_path / "run", text)
    assert _run(evaluate_command, "--checkpoint", str(run), "--device", "cpu", "--json", "--split", "test") == 0
    document = json.loads(capsys.readouterr().out)
    data = build_data(load_model(run, "cpu").config.root)
    assert isinstance(data.test, EvaluationWindows)
    batch = data.test.batch(0, data.test.samples)
    with torch.no_grad():
        logits = gpt(batch.tokens).double()
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100).item()
    assert document["loss"] == pytest.approx(expected, rel=1e-5)
    assert document["step"] == 7
    assert document["tokens"] == document["bytes"] + 1 == len(data.test.stream) - 1
    assert document["bits_per_byte"] == pytest.approx(expected / math.log(2) * document["tokens"] / document["bytes"])


def test_evaluate_command_in_lines_and_on_another_text(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = _write_run(tmp_path / "run", text)
    other = tmp_path / "other.txt"
    other.write_text("Another text, quite short.")
    assert _run(evaluate_command, "--checkpoint", str(run), "--data-path", str(other), "--device", "cpu") == 0
    lines = capsys.readouterr().out
    for word in [str(other), "step 7", "27 tokens", "26 bytes", "bits per byte", "perplexity"]:
        assert word in lines


def test_evaluate_refuses_other_data_than_it_was_trained_on(tmp_path: Path, text: Path) -> None:
    run, _ = _write_run(tmp_path / "run", text)
    text.write_text("something else. " * 40)
    with pytest.raises(UserError, match="has changed since it was trained") as caught:
        _run(evaluate_command, "--checkpoint", str(run), "--device", "cpu")
    assert "--data-path" in str(caught.value)


def test_evaluate_refuses_another_pythons_library(tmp_path: Path, text: Path) -> None:
    run, _ = _write_run(tmp_path / "run", text, fingerprint="0" * 64, data={"data_impl": "pystd"})
    with pytest.raises(UserError, match=r"Python 3\.10\.0") as caught:
        _run(evaluate_command, "--checkpoint", str(run), "--device", "cpu")
    assert "--data-path" in str(caught.value)


def test_empty_split_is_a_user_error(tmp_path: Path, text: Path) -> None:
    data = {"data_impl": "text", "path": str(text), "splits_string": "70,30"}
    run, _ = _write_run(tmp_path / "run", text, data=data)
    with pytest.raises(UserError, match=r"--split test is empty: `model\.data\.splits_string=70,30`"):
        _run(evaluate_command, "--checkpoint", str(run), "--split", "test", "--device", "cpu")


def test_empty_split_of_sets_names_the_set_that_it_lacks(tmp_path: Path, text: Path) -> None:
    for name in "ab":
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for number in range(20):
                writer.add_document(np.arange(10) + number + 3)
            writer.finish()
    prefixes = {"train": [str(tmp_path / "a")], "validation": [str(tmp_path / "b")]}
    run, _ = _write_run(tmp_path / "run", text, data={"data_impl": "mmap", "data_prefix": prefixes})
    with pytest.raises(UserError, match=r"has no dataset for it \(data_prefix\.test\)") as caught:
        _run(evaluate_command, "--checkpoint", str(run), "--split", "test", "--device", "cpu")
    assert "splits_string" not in str(caught.value)


def test_evaluate_tells_what_a_folder_leaves_out(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = _write_run(tmp_path / "run", text)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Another text, quite short.")
    (tmp_path / "texts" / "b.jsonl").write_text('{"text": "no"}')
    command = ["--checkpoint", str(run), "--data-path", str(tmp_path / "texts"), "--device", "cpu", "--json"]
    assert _run(evaluate_command, *command) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["bytes"] == 26
    assert "1 file skipped, not plain text by name: b.jsonl" in said.err


def test_generate_command_repeats_itself(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = _write_run(tmp_path / "run", text, tokenizer={"library": "char"})
    options = ["--checkpoint", str(run), "--device", "cpu", "--max-new-tokens", "30"]
    assert _run(generate_command, *options, "--prompt", "The") == 0
    first = capsys.readouterr().out
    assert _run(generate_command, *options, "--prompt", "The") == 0
    assert capsys.readouterr().out == first
    assert first.startswith("The")
    assert len(first) == 3 + 30 + 1
    assert _run(generate_command, *options, "--prompt", "The", "--seed", "5") == 0
    assert capsys.readouterr().out != first
    assert _run(generate_command, *options, "--prompt", "The", "--stop", first[10:12]) == 0
    assert capsys.readouterr().out == first[: first.index(first[10:12], 3)] + "\n"


def test_generate_command_reads_a_prompt_file(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = _write_run(tmp_path / "run", text)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("quick äöü")
    options = ["--checkpoint", str(run), "--device", "cpu", "--max-new-tokens", "3"]
    assert _run(generate_command, *options, "--prompt-file", str(prompt)) == 0
    assert capsys.readouterr().out.startswith("quick äöü")
    prompt.write_bytes(b"\xff")
    with pytest.raises(UserError, match="offset 0"):
        _run(generate_command, *options, "--prompt-file", str(prompt))
    with pytest.raises(UserError, match="No such file"):
        _run(generate_command, *options, "--prompt-file", str(tmp_path / "missing"))


def test_a_wish_that_is_not_applied_is_said(tmp_path, capsys):
    run_training(tiny_config(tmp_path, model__attention_backend="unfused", trainer__max_steps=1))
    capsys.readouterr()
    load_model(tmp_path, "cpu")
    assert "`model.attention_backend` (unfused) of the run is not applied on cpu" in capsys.readouterr().err
