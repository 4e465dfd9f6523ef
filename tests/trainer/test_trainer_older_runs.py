"""A run written by stoker 0.1.0 resumes, loads, evaluates, generates and converts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_metrics import metric_rows

from stoker.trainer.checkpoint.reader import find_checkpoint
from stoker.trainer.cli.main import main
from stoker.trainer.config import dotted_paths
from stoker.trainer.config.load import config_from_document
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.conversion.to_hf import convert_to_hf
from stoker.trainer.generation.text_generator import Generator, StoppingCriteria
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_OK

FIXTURE = Path(__file__).parents[1] / "data" / "run_0_1_0"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run directory; the working directory is its parent, where the data are."""
    shutil.copytree(FIXTURE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("run")


def test_resumes(run: Path) -> None:
    document = json.loads((run / "config.resolved.json").read_text())
    document["trainer"]["max_steps"] = 4
    assert run_training(config_from_document(document)).step == 4
    lines = metric_rows(run)
    losses = {str(line["step"]): line["loss"] for line in lines if "loss" in line}
    assert list(losses) == ["1", "2", "3", "4"]  # from the checkpoint, not from the start
    assert {step: losses[step] for step in EXPECTED["losses"]} == pytest.approx(EXPECTED["losses"], rel=1e-6)
    checkpoint, complaints = find_checkpoint(run)
    assert (checkpoint.state.step, complaints) == (4, [])


def test_evaluates(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--device", "cpu", "--json"]) == EXIT_OK
    result = json.loads(capsys.readouterr().out)
    assert {key: result[key] for key in EXPECTED["evaluation"]} == pytest.approx(EXPECTED["evaluation"], rel=1e-6)


def test_generates(run: Path) -> None:
    loaded = load_model(run, "cpu")
    assert (loaded.state.step, loaded.state.versions["stoker"]) == (2, "0.1.0")
    prompt = [*loaded.prompt_prefix, *loaded.tokenizer.encode("So long").tolist()]
    (output,) = Generator.from_restored(loaded).generate([prompt], StoppingCriteria(1))
    assert len(output.text) == 1


@pytest.mark.parametrize("name", ["config.resolved.json", "checkpoints/step-2/config.json"])
def test_its_configuration_is_valid_as_it_is(run: Path, name: str) -> None:
    document = json.loads((run / name).read_text())
    saved = dict(dotted_paths.leaves(document))
    found = dict(dotted_paths.leaves(config_from_document(document).document))
    assert {path: found.pop(path) for path in saved} == saved
    sizes = {f"model.{kind}_parallel_size": 1 for kind in ("tensor_model", "context", "expert_model")}
    newer = {"trainer.max_epochs": None, "model.sequence_parallel": False, "model.cp_comm_type": "p2p", **sizes}
    newer |= {"trainer.min_nodes": None, "trainer.max_restarts": 0, "trainer.step_timeout": 300.0}
    newer |= {"model.ub_tp_comm_overlap": False}
    newer |= {f"model.tp_comm_overlap_{part}": True for part in ("ag", "rs")}
    newer["model.hierarchical_context_parallel_sizes"] = None
    newer |= {"model.pipeline_model_parallel_size": 1, "model.pipeline_model_parallel_split_rank": 0}
    newer |= {f"model.account_for_{part}_in_pipeline_split": False for part in ("embedding", "loss")}
    newer |= {f"model.num_layers_in_{end}_pipeline_stage": None for end in ("first", "last")}
    others = ("virtual_pipeline_model_parallel_size", "activations_checkpoint_layers_per_pipeline")
    newer |= dict.fromkeys(
        f"model.{name}" for name in (*others, "num_micro_batches_with_partial_activation_checkpoints")
    )
    newer |= {"model.copy_engine_collectives": None, "model.fp32_residual_connection": False}
    newer |= {"model.softmax_type": "vanilla", "model.optim.overlap_param_sync": None}
    newer |= {"model.native_amp_init_scale": 4294967296, "model.native_amp_growth_interval": 1000}
    newer |= {"model.hysteresis": 2}
    newer |= {"model.fp8": None, "model.fp8_recipe": None, "model.fp8_margin": 0, "model.fp8_e4m3": False}
    newer |= {f"model.{name}": True for name in ("fp8_hybrid", "fp8_wgrad", "reduce_amax")}
    newer |= {"model.fp8_interval": 1, "model.fp8_amax_history_len": 1024, "model.fp8_amax_compute_algo": "max"}
    newer |= {"model.first_last_layers_bf16": False, "model.fp8_params": False}
    newer |= {"model.fp8_dot_product_attention": False, "model.moe_router_force_load_balancing": False}
    newer |= {f"model.num_layers_at_{end}_in_bf16": 1 for end in ("start", "end")}
    newer |= {"exp_manager.create_report": True, "exp_manager.report_sample_tokens": 64}
    newer |= {"model.loss": None, "trainer.callbacks": None}
    newer |= {"trainer.validation_metrics": [], "exp_manager.loggers": []}
    newer |= {f"model.{block}.kwargs": {} for block in ("tokenizer", "optim", "optim.sched")}
    assert found == newer, "keys that are newer have no effect on it"


def test_converts_to_hugging_face_and_back(run: Path, tmp_path: Path) -> None:
    convert_to_hf(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = load_model(run, "cpu")
    ours, theirs = loaded.model.state_dict(), load_model(tmp_path / "hf", "cpu").model.state_dict()
    assert theirs.keys() == ours.keys()
    rows = loaded.tokenizer.vocab_size  # those that pad the embeddings are not converted
    assert [key for key in ours if not torch.equal(theirs[key][:rows], ours[key][:rows])] == []
