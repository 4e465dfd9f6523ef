"""Changes that make a run fit: suggestions, the search of `stoker plan --fit`, and their output."""

import json

import pytest
from config_helpers import load, write
from plan_helpers import FULL, LLAMA, ONE, planned
from resolved import gpu_target, make_plan
from tiers import cases, extra, full_only

from stoker.trainer.cli.main import main
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.search import search, suggest_changes
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK


def test_suggestions_fit_and_the_fastest_is_first():
    root = load(LLAMA).root
    target = gpu_target(root, parse_gpu("24GiB"))
    plan = make_plan(root, target)
    assert plan.fits is False
    found = suggest_changes(root, target, plan)
    assert found
    assert found[0].plan.fits
    assert not found[-1].plan.fits
    order = [(not change.plan.fits, change.plan.seconds) for change in found]
    assert order == sorted(order)
    # each is a configuration that can be had, and its effect is that of its plan
    first = make_plan(load(LLAMA, *found[0].overrides()).root, target)
    assert (first.allocated, first.seconds) == (found[0].plan.allocated, found[0].plan.seconds)


def test_the_search_finds_the_cheapest_that_fits():
    root = load(LLAMA).root
    whole = gpu_target(root, parse_gpu("h200"))
    plan = make_plan(root, whole)
    best, _ = search(root, whole, plan)
    assert best is not None
    assert best.values == {}
    costs = []
    for size in ("32GiB", *extra("22GiB"), "13GiB"):
        target = gpu_target(root, parse_gpu(f"h200:{size}"))
        best, _ = search(root, target, make_plan(root, target))
        assert best is not None, size
        assert best.plan.fits
        assert make_plan(load(LLAMA, *best.overrides()).root, target).needed == best.plan.needed
        costs.append(best.plan.seconds)
    assert costs == sorted(costs)


@full_only
def test_the_search_takes_the_largest_micro_batch_that_fits():
    """Also where it is far from the one that is asked for."""
    for size in (512, *extra(8)):
        root = load("model=gpt_125m", "data=mock", "model.global_batch_size=512", f"model.micro_batch_size={size}").root
        target = gpu_target(root, parse_gpu("5GiB"))
        best, _ = search(root, target, make_plan(root, target))
        assert best is not None
        assert best.values == {"micro_batch_size": 4}
        larger = {"model": root.model.model_copy(update={**best.values, "micro_batch_size": 8})}
        assert not make_plan(root.model_copy(update=larger), target).fits


@pytest.mark.parametrize(
    "mode", cases([["model.cpu_offloading=True", "model.cpu_offloading_num_layers=22"], FULL], fast=1)
)
def test_the_search_switches_off_what_costs_time(mode):
    root = load(LLAMA, *mode).root
    target = gpu_target(root, parse_gpu("h200"))
    best, _ = search(root, target, make_plan(root, target))
    assert best is not None
    assert best.plan.seconds == pytest.approx(planned(LLAMA).seconds)
    assert make_plan(load(LLAMA, *mode_without(mode, best.overrides())).root, target).seconds == best.plan.seconds


def mode_without(words, overrides):
    """Overrides beside those words that they do not replace."""
    keys = {override.partition("=")[0] for override in overrides}
    return [*(word for word in words if word.partition("=")[0] not in keys), *overrides]


def test_without_times_the_search_changes_what_costs_least_to_change():
    root = load("model=gpt_125m", "data=mock", "trainer.precision=32").root
    target = gpu_target(root, parse_gpu("11GiB"))
    plan = make_plan(root, target)
    best, _ = search(root, target, plan)
    assert plan.time is None
    assert best is not None
    assert best.values == {"activations_checkpoint_modules": ["norm"]}, "and nothing goes to the host"


def test_a_recording_that_cannot_be_had_is_not_planned(capsys):
    drawn = [*FULL, "model.attention_dropout=0.1", "model.attention_backend=sdpa_math", "model.enable_cuda_graph=True"]
    assert main(["plan", "model=gpt_moe_8x", "data=mock", "--device", "h100", *drawn]) == EXIT_BAD_INPUT
    assert "does not capture RNG state" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["granularity=selective", "modules=[core_attention]"])
@pytest.mark.parametrize("model", cases(["bert_base", "t5_base", "gpt_125m"], fast=1))
def test_recomputation_without_effect_does_not_end_recordings(model, key):
    given = [f"model={model}", "data=mock", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
    if model == "t5_base":
        given = given[:2]  # it has dropout
    plain, idle = planned(*given), planned(*given, f"model.activations_checkpoint_{key}")
    assert plain.inputs.uses_cuda_graph
    assert idle.inputs.uses_cuda_graph
    assert (idle.allocated, idle.seconds) == (plain.allocated, plain.seconds)
    kept = planned(*given, f"model.activations_checkpoint_{key}", "model.attention_backend=sdpa_math")
    assert not kept.inputs.uses_cuda_graph


def test_header_and_note_agree_on_what_lora_keeps(capsys):
    given = ["model=llama_1b", "data=mock", "peft=lora", "model.activations_checkpoint_modules=[norm]"]
    assert main(["plan", "--device", "h100", *given]) == EXIT_OK
    out = capsys.readouterr().out
    assert "recomputes nothing" in out
    assert "recomputing norm has no effect" in out


def test_stacks_of_a_t5_are_changed_where_they_are_given(tmp_path, capsys):
    """Keys of `--fit` load again: in the place of words, and beside a key that both stacks have from `model`."""
    whole = "".join(f"  {word.partition('.')[2].replace('=', ': ')}\n" for word in FULL)
    write(tmp_path, "mine", f"defaults: [train, _self_]\nmodel:\n{whole}")
    given = ["plan", "model=t5_base", "data=mock", "--config-dir", str(tmp_path), "--config-name", "mine"]
    words = ["model.micro_batch_size=8", "model.encoder.hidden_dropout=0.0"]
    assert main([*given, *words, "--device", "h100:3.5GiB", "--fit", "--json"]) == EXIT_OK
    best = json.loads(capsys.readouterr().out)["best"]
    assert "model.activations_checkpoint_granularity=null" in best["overrides"]
    assert not any("coder.activations_checkpoint_granularity" in override for override in best["overrides"])
    assert best["instead_of"] == ["model.micro_batch_size=8"]
    again = [*given, *mode_without(words, best["overrides"]), "--device", "h100:3.5GiB", "--json"]
    assert main(again) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told["fits"]
    assert (told["memory"]["needed"], told["time"]["seconds"]) == (best["needed"], best["seconds"])


def test_changes_say_what_is_needed_and_what_they_replace(capsys):
    batch = "model.micro_batch_size=8"
    assert main(["plan", "model=llama_1b", "data=mock", "--device", "24GiB", batch]) == EXIT_OK
    lines = [line for line in capsys.readouterr().out.splitlines() if " GiB (-" in line]
    for line in lines:
        needed = float(line.split()[0])
        assert (needed > 24) == ("does not fit yet" in line), line
        assert (batch in line) == ("model.micro_batch_size=" in line.split(")")[1]), line
    assert any("(instead of model.micro_batch_size=8)" in line for line in lines)
    assert main(["plan", LLAMA, *FULL, "--device", "h100", "--fit"]) == EXIT_OK
    assert "(+" in capsys.readouterr().out, "more memory for less time"


def test_what_is_taken_for_granted_is_told(capsys):
    assert main(["plan", LLAMA, "--device", "24GiB", "--json"]) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told["device"]["measured"]
    assert "a memory size alone: this plan is for an NVIDIA H100 80GB HBM3" in told["notes"][0]
    nodes = ["model.fsdp=True", "trainer.devices=8", "trainer.num_nodes=4", "model.global_batch_size=128"]
    assert main(["plan", LLAMA, "--device", "h100", *nodes]) == EXIT_OK
    assert "the network between 4 nodes has 46 GB/s for each GPU" in capsys.readouterr().out
    assert main(["plan", LLAMA, "--device", ""]) == EXIT_BAD_INPUT


def test_stacks_of_a_t5_are_changed_alike():
    t5 = ("experiment=t5_bench", *ONE, "model.seq_length=8192", "model.data.seq_length_dec=2048")
    root = load(*t5).root
    target = gpu_target(root, parse_gpu("h200:7GiB"))
    assert make_plan(root, target).fits is False
    best, _ = search(root, target, make_plan(root, target))
    assert best is not None
    assert {key.partition(".")[0] for key in best.values} >= {"encoder", "decoder"}
    assert make_plan(load(*t5, *best.overrides()).root, target).fits
