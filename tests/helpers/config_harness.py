"""Build and run tiny configurations for the tests of keys, and define common changes of keys."""

from __future__ import annotations

import hashlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from resolved import build_data, build_model
from run_metrics import metric_rows
from tiny_run import tiny_document

from stoker.models.gpt import GPT
from stoker.trainer.config import dotted_paths
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.train import TrainingResult, run_training

CPU = torch.device("cpu")
MODEL, TRAINER, MANAGER, OPTIM = "model.", "trainer.", "exp_manager.", "model.optim."
TOKENIZER = MODEL + "tokenizer."
SCHED, CALLBACK, DATA = "model.optim.sched.", "exp_manager.checkpoint_callback_params.", "model.data."
BASE = {
    "model.hidden_size": 16,
    "model.ffn_hidden_size": 32,
    "model.encoder_seq_length": 8,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.init_method_std": 0.3,  # large enough that every part of the model affects the output
    "trainer.max_steps": 4,
    "trainer.log_every_n_steps": 1,
    "trainer.limit_val_batches": 0,
    "exp_manager.create_checkpoint_callback": False,
    "model.optim.sched": {},
}
Changes = dict[str, Any]


def fingerprint(value: torch.Tensor) -> str:
    return hashlib.sha256(repr(value.shape).encode() + value.detach().float().numpy().tobytes()).hexdigest()


class ConfigHarness:
    """Build and run tiny configurations.

    Args:
        folder: for run directories and data.
        capsys: captures the output of runs.
        monkeypatch: for observables that patch modules.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.capsys = capsys
        self.monkeypatch = monkeypatch
        self.runs = 0
        self.text = folder / "text.txt"
        self.text.write_text("To be, or not to be, that is the question. " * 20)

    def document(self, changes: Changes, directory: Path | None = None) -> dict[str, Any]:
        document = tiny_document(directory or self.folder / "unused")
        for path, value in {**BASE, **changes}.items():
            dotted_paths.put(document, path, deepcopy(value))
        return document

    def root(self, changes: Changes) -> RootBlock:
        return RootBlock.model_validate(self.document(changes))

    def model(self, changes: Changes) -> GPT:
        root = self.root(changes)
        model = build_model(root, build_data(root))
        assert isinstance(model, GPT)
        return model

    def run(self, changes: Changes, directory: Path | None = None) -> TrainingResult:
        self.runs += 1
        directory = directory or self.folder / f"run-{self.runs}"
        document = self.document(changes, directory)
        return run_training(RunConfig(RootBlock.model_validate(document), document=document))

    def metrics(self, changes: Changes) -> list[dict[str, Any]]:
        return metric_rows(self.run(changes).directory)

    def printed(self, changes: Changes) -> str:
        self.capsys.readouterr()
        self.run(changes)
        return self.capsys.readouterr().out


MOE = {MODEL + "num_moe_experts": 4, MODEL + "num_layers": 2}
DROPS_TOKENS = {**MOE, MODEL + "moe_expert_capacity_factor": 0.5}
SPARE_CAPACITY = {**MOE, MODEL + "num_layers": 1, MODEL + "moe_expert_capacity_factor": 1.5}
SEQUENTIAL_MOE = {**MOE, MODEL + "moe_grouped_gemm": False}  # interpreted kernels would take most of a run
SIGMOID = {**SEQUENTIAL_MOE, MODEL + "moe_router_score_function": "sigmoid"}
EXPERT_BIAS = {**SIGMOID, MODEL + "moe_router_enable_expert_bias": True}
ROPE = {"model.position_embedding_type": "rope"}
LLAMA3_ROPE = {**ROPE, "model.rotary_scaling": "llama3", "model.rotary_original_length": 8}
YARN = {**ROPE, "model.rotary_scaling": "yarn", "model.rotary_original_length": 1000}
ALIBI = {"model.position_embedding_type": "alibi"}
BUCKETS = {"model.position_embedding_type": "relative", "model.relative_attention_num_buckets": 4}
VALIDATES = {"trainer.limit_val_batches": 1, "trainer.val_check_interval": 2}
TEXT = {"model.data.data_impl": "text"}
NGRAMS = {DATA + "geometric_dist": True, DATA + "masked_lm_prob": 0.4}
PIECES = {DATA + "respect_document_boundaries": True, "model.seq_length": 64}
PREFIX = {DATA + "dataset_type": "t5_prefix_lm"}
SAVES = {"exp_manager.create_checkpoint_callback": True, CALLBACK + "every_n_train_steps": 1}

SGD, ADAFACTOR, MUON = ({OPTIM + "name": name} for name in ("sgd", "adafactor", "muon"))

STOPPING = "exp_manager.early_stopping_callback_params."
EVERY = {**VALIDATES, "trainer.val_check_interval": 1, STOPPING + "patience": 1, STOPPING + "min_delta": 9.0}
STOPS = {**EVERY, "exp_manager.create_early_stopping_callback": True}
AVERAGES = {**VALIDATES, "exp_manager.ema.enable": True, "exp_manager.ema.decay": 0.9}

RECOMPUTE = MODEL + "activations_checkpoint_"
DEEP = {MODEL + "num_layers": 3, MODEL + "attention_backend": "unfused"}
WHOLE = {**DEEP, RECOMPUTE + "granularity": "full", RECOMPUTE + "method": "uniform", RECOMPUTE + "num_layers": 1}
