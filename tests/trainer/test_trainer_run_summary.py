"""Log lines at the start of a run: the table of modules, and a default that makes attention slow."""

import pytest
import torch
from resolved import build_data, build_model

from stoker.models.build import num_parameters
from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core.run_checks import check_default_dropout, choose_attention
from stoker.trainer.core.run_summary import describe_fp8, module_table, summarize_run

CPU = torch.device("cpu")
FROZEN = ["peft=lora", "model.restore_from_path=x"]
GPT = ("model=gpt_tiny", "~model.attention_dropout")
T5 = ("model=t5_tiny", "~model.encoder.attention_dropout", "~model.decoder.attention_dropout")


@pytest.mark.parametrize("model", ["gpt_tiny", "t5_tiny", "bert_tiny"])
def test_the_table_of_modules_sums_up(model):
    root = load_run_config(overrides=[f"model={model}", "data=mock"]).root
    built = build_model(root, build_data(root))
    head, *rows = (line.split() for line in module_table(built))
    assert head == ["module", "type", "parameters"]
    numbers = [int(row[-1].replace(",", "")) for row in rows]
    assert rows[-1][0] == "total"
    assert sum(numbers[:-1]) == numbers[-1] == num_parameters(built)


def test_trained_parameters_are_those_of_all_ranks():
    root, of_rank = (
        load_run_config(overrides=[*GPT, *FROZEN, "data=mock", "trainer=cpu", f"model.num_layers={layers}"]).root
        for layers in (4, 2)
    )
    data = build_data(root)
    whole, part = build_model(root, data), build_model(of_rank, data)
    trained = sum(parameter.numel() for parameter in trainable_parameters(whole).values())
    said = "\n".join(summarize_run(resolve_run(root), part, data, CPU, cuda_graph=False))
    assert f"lora: {trained:,} parameters are trained ({100 * trained / num_parameters(whole):.2g} % of all)" in said


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], []),
        (
            ["model.fp8=true", "model.micro_batch_size=1"],
            [
                "fp8 in training: tensorwise scaling, e4m3, gradients e5m2 (delayed scaling, NeMo's default, needs "
                "`transformer_engine: True`), 16 linear layers, emulated on a CPU, slowly; weights are cast once a "
                "step; validation multiplies in fp32"
            ],
        ),
        (
            ["model.fp8=true", "model.fp8_recipe=rowwise", "model.num_moe_experts=4", "model.bias=false"],
            ["8 linear layers and experts of 4 layers"],
        ),
        (
            [*FROZEN, "model.fp8=true", "model.first_last_layers_bf16=true", "model.num_layers_at_end_in_bf16=2"],
            ["4 linear layers of 1 layer, emulated on a CPU, slowly; weights are cast once; validation"],
        ),
        (
            ["model.fp8=true", "model.num_moe_experts=4", "model.first_last_layers_bf16=true", "model.bias=true"],
            ["4 linear layers of 2 layers", "experts multiply in fp32: grouped fp8 matmuls add no bias (`bias`)"],
        ),
    ],
)
def test_a_run_tells_what_is_in_fp8(overrides, lines):
    root = load_run_config(overrides=["model=gpt_tiny", "data=mock", "trainer.accelerator=cpu", *overrides]).root
    found = list(describe_fp8(resolve_run(root), build_model(root, build_data(root)), CPU))
    assert len(found) == len(lines)
    assert all(line in full for line, full in zip(lines, found, strict=True)), found


def dropout_warnings(*overrides: str) -> list[str]:
    config = load_run_config(overrides=["data=mock", *overrides])
    run = resolve_run(config.root)
    return check_default_dropout(config, run, CPU, choose_attention(run, CPU))


def test_default_dropout_that_takes_attention_to_unfused_is_a_warning():
    (line,) = dropout_warnings(*GPT)
    assert "`model.attention_dropout` (0.1, the default) rules out sdpa_flash" in line
    assert line.endswith("model.attention_dropout=0")
    cure = line.rpartition(": ")[2].split()
    assert dropout_warnings(GPT[0], *cure) == []


@pytest.mark.parametrize(
    "chosen", [["model.attention_dropout=0.1"], [GPT[1], "model.attention_backend=unfused"], ["~model.hidden_dropout"]]
)
def test_chosen_dropout_or_attention_is_not(chosen):
    assert dropout_warnings(GPT[0], *chosen) == []


def test_a_run_prints_it(tmp_path, capsys):
    from stoker.trainer.train import run_training

    options = ["trainer.fast_dev_run=True", "model.num_layers=1", "trainer.accelerator=cpu"]
    run_training(load_run_config(overrides=["data=mock", *GPT, *options, f"exp_manager.explicit_log_dir={tmp_path}"]))
    assert "warning: `model.attention_dropout` (0.1, the default)" in capsys.readouterr().out
