"""T5 and BERT through the whole trainer: steps, resume, averages, evaluation, figures, explanations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from resolved import batch_spec, build_data
from resolved import build_model as build_model_of_run
from run_metrics import metric_rows
from tiers import extra
from tiny_run import final_hashes, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.bert import BERT
from stoker.models.build import build_model
from stoker.models.model_cost import training_flops_per_sample
from stoker.models.t5 import T5
from stoker.trainer.cli import main
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.core import run_summary, training_loop
from stoker.trainer.optim.optimizer_factory import fused_projection_rows
from stoker.trainer.train import run_training

CPU = torch.device("cpu")
STACK: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2, "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}  # fmt: skip
RELATIVE = STACK | {"position_embedding_type": "relative", "relative_attention_num_buckets": 8, "bias": False}
COMMON: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "optim": {"lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}},
}
T5_MODEL = COMMON | {
    "family": "t5",
    "seq_length": 32,
    "encoder": RELATIVE,
    "decoder": RELATIVE | {"num_layers": 2, "num_attention_heads": 4},
}
BERT_MODEL = COMMON | STACK | {"family": "bert", "encoder_seq_length": 32, "transformer_block_type": "post_ln"}
MOCK = {"data_impl": "mock"}
WINDOWS = {"data_impl": "text"}
PADDED = WINDOWS | {"respect_document_boundaries": True}
PACKED = PADDED | {"packed_sequence": True}
CASES = {
    "t5 mock": (T5_MODEL, MOCK),
    "t5 windows": (T5_MODEL, WINDOWS),
    "t5 padded": (T5_MODEL, PADDED),
    "t5 packed": (T5_MODEL, PACKED),
    "t5 prefix": (T5_MODEL, WINDOWS | {"dataset_type": "t5_prefix_lm"}),
    "bert": (BERT_MODEL, WINDOWS),
    "bert packed": (BERT_MODEL, WINDOWS | {"reset_attention_mask": True, "reset_position_ids": True}),
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"number {number} says: " + "to be, or not to be. " * (1 + number % 5))
    return folder


def config(directory: Path, case: str, text: Path, **changes: Any) -> RunConfig:
    model, data = CASES[case]
    source = data | ({"path": str(text)} if data["data_impl"] == "text" else {})
    return tiny_config(directory, model=model | {"data": source}, **changes)


@pytest.mark.parametrize("case", ["t5 packed", *extra(*(case for case in CASES if case != "t5 packed"))])
def test_a_resumed_run_ends_as_the_unbroken_one(case: str, tmp_path: Path, text: Path) -> None:
    changes = {"exp_manager__ema": {"enable": True, "decay": 0.9}}
    whole = run_training(config(tmp_path / "whole", case, text, **changes))
    assert (whole.exit_code, whole.step) == (0, 8)
    run_training(config(tmp_path / "parts", case, text, trainer__max_steps=4, **changes))
    parts_of_it = run_training(config(tmp_path / "parts", case, text, **changes))
    assert parts_of_it.step == 8
    assert final_hashes(tmp_path / "whole", 8) == final_hashes(tmp_path / "parts", 8)
    assert whole.validation is not None
    figures = [line for line in metric_rows(tmp_path / "whole") if "loss" in line]
    assert all(0 < line["loss"] < 10 for line in figures)
    restored = load_model(tmp_path / "whole", "cpu")
    assert type(restored.model) is type(whole.model)


@pytest.mark.parametrize("case", [*extra("t5 padded"), "t5 packed", "bert"])
def test_accumulation_changes_nothing(case: str, tmp_path: Path, text: Path) -> None:
    exact = {"trainer__precision": "64", "trainer__max_steps": 3, "trainer__val_check_interval": 3}
    without = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    losses: list[list[float]] = []
    for size in (1, 4):
        made = config(tmp_path / str(size), case, text, **exact)
        model = made.document["model"] | {"micro_batch_size": size}
        stacks = ("encoder", "decoder") if "encoder" in model else ()
        model |= {stack: model[stack] | without for stack in stacks} or without
        result = run_training(tiny_config(tmp_path / str(size), model=model, **exact))
        assert result.validation is not None
        losses.append([line["loss"] for line in metric_rows(tmp_path / str(size)) if "loss" in line])
        losses[-1].append(result.validation.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_tokens_are_those_of_encoder_and_decoder(tmp_path: Path, text: Path) -> None:
    made = config(tmp_path, "t5 windows", text)
    form = batch_spec(made.root)
    data = build_data(made.root)
    model = build_model_of_run(made.root, data)
    rates = training_loop.build_throughput(made.resolved, data.vocab_size, CPU)
    assert form.decoder_seq_length > 0
    assert rates.tokens_per_sample == form.seq_length + form.decoder_seq_length
    whole = training_flops_per_sample(made.root.model, 384, form)
    assert rates.flops_per_token * rates.tokens_per_sample == pytest.approx(whole)
    said = "\n".join(run_summary.summarize_run(made.resolved, model, data, CPU, cuda_graph=False))
    assert "1 and 2 layers" in said
    assert f"{4 * rates.tokens_per_sample:,} tokens each" in said
    assert "cross training unfused" in said


@pytest.mark.parametrize("case", ["t5 mock", "bert"])
def test_flops_are_those_torch_counts(case: str, tmp_path: Path, text: Path) -> None:
    made = config(tmp_path, case, text)
    keys = made.root.model
    form = batch_spec(made.root)
    model = build_model(
        keys, vocab_size=384, device="cpu", dtype=torch.float32, flags=AttentionFlags(),
        micro_batch_size=1, batch_spec=form
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "backends"):
            from stoker.kernels.attention.backends.unfused import UnfusedAttention

            found: Any = module
            found.backends = dict.fromkeys(found.backends, UnfusedAttention())  # what the counter sees through
    tokens = torch.zeros((1, form.seq_length), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if isinstance(model.eval(), T5):
            model(tokens, torch.zeros((1, form.decoder_seq_length), dtype=torch.int64))
        else:
            model(tokens)
    hidden_half = 0
    if isinstance(model, T5):  # the half that the causal mask hides, which the formula leaves out
        hidden_half = 6 * 2 * 32 * form.decoder_seq_length**2
    assert training_flops_per_sample(keys, 384, form) == counter.get_total_flops() * 3 - hidden_half


def test_muon_knows_every_weight_that_holds_several_projections(tmp_path: Path, text: Path) -> None:
    made = config(tmp_path, "t5 mock", text)
    gated = {name: made.document["model"][name] | {"activation": "geglu"} for name in ("encoder", "decoder")}
    root = tiny_config(tmp_path, model=made.document["model"] | gated).root
    model = build_model_of_run(root, build_data(root))
    fused = fused_projection_rows(root.model)
    several = (".qkv.weight", ".kv.weight", ".up.weight")
    for name, parameter in model.named_parameters():
        rows = [parts for end, parts in fused.items() if name.endswith(end)]
        assert len(rows) == name.endswith(several), name
        assert all(sum(parts) == len(parameter) for parts in rows), name


def test_a_shorter_decoder_is_told_when_a_run_goes_on(tmp_path: Path, text: Path, capfd: Any) -> None:
    made = config(tmp_path, "t5 mock", text, trainer__max_steps=2)
    run_training(made)
    model = made.document["model"]
    capfd.readouterr()
    run_training(tiny_config(tmp_path, model=model | {"data": MOCK | {"seq_length_dec": 20}}, trainer__max_steps=3))
    assert "`model.data.seq_length_dec` was" in capfd.readouterr().out


def test_samples_that_are_made_differently_are_told_when_a_run_goes_on(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the text nor the lengths tell."""
    made = config(tmp_path, "bert", text, trainer__max_steps=1)
    run_training(made)
    capfd.readouterr()
    data = made.document["model"]["data"]
    other = made.document["model"] | {"data": data | {"masked_lm_prob": 0.3, "splits_string": "80,20,0"}}
    run_training(tiny_config(tmp_path, model=other, trainer__max_steps=2))
    said = capfd.readouterr().out
    assert "`model.data.masked_lm_prob` was 0.15 in step-1 and is 0.3 now" in said
    assert "`model.data.splits_string` was" in said
    assert said.count("samples are built differently") == 2
    run_training(tiny_config(tmp_path, model=other, trainer__max_steps=3))
    assert "built differently" not in capfd.readouterr().out


# ---------------------------------------------------------------- commands


def test_flash_on_a_cpu_is_refused_with_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flash = [f"model.{stack}.attention_backend=flash" for stack in ("encoder", "decoder")]
    where = f"exp_manager.explicit_log_dir={tmp_path / 'run'}"
    assert main.main(["train", "model=t5_base", "data=mock", "trainer=cpu", "trainer.max_steps=1", *flash, where]) == 2
    said = capsys.readouterr().err
    assert re.findall("attention `(.*?)`", said) == ["encoder", "decoder", "cross"]  # all at once
    assert said.count("not support dropout (0.1) or a bias with gradient") == 2
    assert not (tmp_path / "run").exists()


def test_explain_shows_the_three_attentions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "attention", "model=t5_base", "--arch", "sm90"]) == 0
    said = capsys.readouterr().out
    assert "12 encoder layers and 12 decoder layers" in said
    for name, facts in (
        ("encoder", "512 x 512 tokens, full, distance bias with gradient"),
        ("decoder", "114 x 114 tokens, causal, distance bias with gradient"),
        ("cross", "114 x 512 tokens, full, dropout 0.1"),
    ):
        (line,) = [line for line in said.splitlines() if line.startswith(f"{name} training:")]
        assert facts in line
        assert f"{name} generation:" in said
    assert main.main(["explain", "attention", "model=bert_tiny", "--arch", "cpu"]) == 0
    assert "full" in capsys.readouterr().out


def test_checkpoints_are_evaluated_and_answer(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_training(config(tmp_path / "t5", "t5 padded", text))
    assert result.validation is not None
    capsys.readouterr()
    assert main.main(["evaluate", "--checkpoint", str(tmp_path / "t5"), "--batch-size", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] > 0
    assert (
        main.main(["generate", "--checkpoint", str(tmp_path / "t5"), "--prompt", "to be", "--max-new-tokens", "5"]) == 0
    )
    assert capsys.readouterr().out.endswith("\n")
    assert main.main(["generate", "--checkpoint", str(tmp_path / "t5")]) == 2
    assert "--prompt" in capsys.readouterr().err
    run_training(config(tmp_path / "bert", "bert", text))
    assert main.main(["evaluate", "--checkpoint", str(tmp_path / "bert"), "--json"]) == 0
    capsys.readouterr()
    assert main.main(["generate", "--checkpoint", str(tmp_path / "bert"), "--prompt", "x"]) == 2
    assert isinstance(load_model(tmp_path / "bert", "cpu").model, BERT)
