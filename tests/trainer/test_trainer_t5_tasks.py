"""T5's offline tasks from end to end: span corruption, then docstrings; resumed runs draw what they would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_helpers import load
from tiers import cases, extra, full_only
from tiny_run import final_hashes

from stoker.trainer.cli import main
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.train import TrainingResult, run_training

STACK = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.1}
PACKED = {"respect_document_boundaries": True, "packed_sequence": True}
TINY = (
    *("model=t5_tiny", "trainer=cpu", "model.seq_length=96", "model.micro_batch_size=8", "model.global_batch_size=8"),
    *("exp_manager.create_tensorboard_logger=False", "trainer.enable_model_summary=False"),
)


def run(folder: Path, text: Path, steps: int, **data: Any) -> TrainingResult:
    document = {
        "trainer": {"accelerator": "cpu", "max_steps": steps, "val_check_interval": 2, "limit_val_batches": 1},
        "exp_manager": {
            "explicit_log_dir": str(folder),
            "resume_if_exists": True,
            "create_tensorboard_logger": False,
        },
        "model": {
            "family": "t5",
            "seq_length": 24,
            "encoder": STACK,
            "decoder": STACK,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "data": {"data_impl": "text", "path": str(text), "splits_string": "80,20,0", **data},
            "optim": {"scale_parameter": True, "lr": 1e-2, "sched": {"max_steps": 9}},
        },
    }
    return run_training(RunConfig(RootBlock.model_validate(document), document=document))


@pytest.mark.parametrize(
    "data",
    [PACKED, *extra({}, {"geometric_dist": True, "masked_lm_prob": 0.3}, {**PACKED, "num_workers": 1})],
    ids=lambda data: "-".join(data),
)
def test_a_resumed_run_draws_the_same_spans(data: dict[str, Any], tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"This is text {number}; " * (number % 7 + 1))
    run(tmp_path / "whole", texts, 4, **data)
    for steps in (2, 4):
        run(tmp_path / "parts", texts, steps, **data)
    assert final_hashes(tmp_path / "whole", 4) == final_hashes(tmp_path / "parts", 4)


@pytest.mark.parametrize("keys", cases(["reset_attention_mask", "reset_position_ids", "geometric_dist"], fast=1))
def test_a_bert_fills_in_hidden_tokens(keys: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 30)
    sizes = ("model.encoder_seq_length=16", "model.hidden_size=16", "model.ffn_hidden_size=16", "trainer.max_steps=2")
    result = run_training(
        load(
            *("model=bert_tiny", "trainer=cpu", "data=text", f"model.data.path={text}", *sizes),
            *(f"model.data.{keys}=true", "trainer.limit_val_batches=1", "exp_manager.create_tensorboard_logger=False"),
            f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
        )
    )
    assert result.validation is not None
    assert result.validation.tokens > 4


@full_only
def test_span_corruption_then_docstrings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two experiments in small: the loss falls, the second begins with the first, and its answers are scored."""
    first = run_training(
        load(
            *("experiment=t5_pystd", *TINY, "trainer.max_steps=60", "trainer.val_check_interval=60"),
            "model.optim.lr=3e-2",  # that of the experiment is for a larger model
            *("trainer.limit_val_batches=2", f"exp_manager.explicit_log_dir={tmp_path / 'pystd'}"),
        )
    )
    assert first.validation is not None
    assert first.validation.loss < 4.3  # ln 384 is 5.95
    second = run_training(
        load(
            *("experiment=t5_docstring", *TINY, "trainer.max_steps=40", "trainer.val_check_interval=40"),
            *("trainer.limit_val_batches=4", f"exp_manager.explicit_log_dir={tmp_path / 'docstring'}"),
            f"model.restore_from_path={tmp_path / 'pystd'}",
        )
    )
    assert second.validation is not None
    assert second.validation.loss < 3.6
    capsys.readouterr()
    command = ["evaluate", "--checkpoint", str(tmp_path / "docstring"), "--split", "test", "--device", "cpu"]
    assert main.main([*command, "--limit-batches", "2", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["texts"] == 16
    assert 0 < scores["copied_name"]["rouge_l"] < 1
    assert 0 <= scores["exact_match"] <= scores["rouge_l"] <= 1
