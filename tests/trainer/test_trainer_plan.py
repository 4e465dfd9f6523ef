"""The plan of a run: peak and time, what would make it fit, the verb, and what `train` tells of it."""

import json
from dataclasses import replace

import pytest
import torch
from config_helpers import load
from plan_helpers import FULL, LLAMA, OFFLOAD, ONE, planned
from resolved import gpu_target, make_plan
from tiers import looped

from stoker.models.model_cost import training_flops_per_sample
from stoker.trainer.cli.main import main
from stoker.trainer.core.run_context import report_out_of_memory
from stoker.trainer.plan.hardware import EFFICIENCY, GIB, GPU_NAMES, match_gpu, parse_gpu
from stoker.trainer.plan.layers import layers_in_order
from stoker.trainer.plan.report import (
    measured_line,
    memory_categories,
    out_of_memory_lines,
    report_lines,
    summary_lines,
)
from stoker.trainer.plan.roofline import (
    attention_core_work,
    recompute_work,
)
from stoker.trainer.plan.search import effective_modules, search, suggest_changes
from stoker.trainer.plan.state_memory import offload_bucket_bytes
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

# ---------------------------------------------------------------- memory


def test_the_parts_at_the_peak_are_the_peak():
    for overrides in ((LLAMA,), (LLAMA, *FULL), (LLAMA, *OFFLOAD), ("experiment=t5_bench",), ("experiment=moe_bench",)):
        plan = planned(*overrides)
        assert sum(size for _, size in memory_categories(plan)) == plan.allocated


def test_the_state_is_that_of_the_optimizer():
    plan = planned(LLAMA)
    held, parameters = plan.memory.persistent, plan.num_parameters
    assert (held.weights, held.main_weights, held.optimizer) == (2 * parameters, 4 * parameters, 8 * parameters)
    assert held.gradient_sums == 0
    assert planned(LLAMA, "model.global_batch_size=8").memory.persistent.gradient_sums == 4 * parameters
    wide = planned(LLAMA, "model.megatron_amp_O2=False").memory.persistent
    assert (wide.weights, wide.main_weights, wide.optimizer) == (4 * parameters, 0, 8 * parameters)


def test_attention_in_fp8_saves_one_byte_of_each():
    """Queries, keys, values and output; in bf16 the cast for the output projection does not stand for the output."""
    te = (LLAMA, "model.fp8=true", "model.transformer_engine=true", "model.fp8_recipe=tensorwise")
    ends = "model.first_last_layers_bf16=true"
    for changes, layers in (((), 24), ((ends,), 22)):
        bf16 = planned(*te, *changes)
        fp8 = planned(*te, *changes, "model.fp8_dot_product_attention=true")
        stack = bf16.inputs.stacks[0]
        attention = stack.stack.attention
        width = (2 * attention.heads + 2 * attention.groups) * attention.head_dim
        assert bf16.allocated - fp8.allocated > 0
        found = [sum(each.saved_bytes for each in plan.memory.layers) for plan in (bf16, fp8)]
        assert found[0] - found[1] == layers * stack.tokens * width
        scales = fp8.memory.persistent.weights - bf16.memory.persistent.weights
        assert scales == layers * 6 * 4 * (2 + 1024)
        assert (fp8.inputs.stacks[0].attention.backend, fp8.inputs.stacks[0].attention.call.fp8) == ("te_fused", True)
    assert "TransformerEngine, with attention) in 22 of 24 layers" in "\n".join(report_lines(fp8, []))


def test_the_plan_says_that_experts_do_not_multiply_in_fp8():
    for more, says in (
        ([], "in 4 of 4 layers, "),
        (["model.fp8_wgrad=false"], "in 4 of 4 layers without their experts"),
    ):
        plan = planned("model=mixtral_tiny", "model.fp8=true", *more)
        assert says in "\n".join(report_lines(plan, []))


def test_the_moving_average_is_where_it_is_asked_for():
    average = "exp_manager.ema.enable=True"
    plan, on_device = planned(LLAMA), planned(LLAMA, average)
    on_host = planned(LLAMA, average, "exp_manager.ema.cpu_offload=True")
    seldom = planned(LLAMA, average, "exp_manager.ema.cpu_offload=True", "exp_manager.ema.every_n_steps=10")
    size = 4 * plan.num_parameters
    assert (on_device.memory.persistent.ema, on_device.on_host) == (size, 0)
    assert (on_host.memory.persistent.ema, on_host.on_host) == (0, size)
    assert on_device.allocated - plan.allocated == size
    assert on_host.allocated == plan.allocated
    link = parse_gpu("h200").host_link
    assert on_host.seconds - plan.seconds == pytest.approx(size / link)
    assert seldom.seconds - plan.seconds == pytest.approx(size / link / 10)
    assert plan.seconds < on_device.seconds < on_host.seconds
    assert on_device.seconds - plan.seconds == pytest.approx(3 * size / 3.6e12)
    beside = planned(LLAMA, average, "exp_manager.ema.cpu_offload=True", "model.cpu_offloading_optimizer=True")
    assert beside.on_host == 4 * size, "with main weights and two moments, from which nothing is copied"
    assert beside.seconds == planned(LLAMA, "model.cpu_offloading_optimizer=True").seconds


def test_sharded_ranks_hold_their_part():
    ranks = [LLAMA, "model.global_batch_size=16", "trainer.devices=4"]
    plan = planned(*ranks, "model.fsdp=True", world=4)
    held, parameters = plan.memory.persistent, plan.num_parameters
    assert (held.weights, held.main_weights, held.optimizer) == (parameters // 2, parameters, 2 * parameters)
    assert plan.memory.moments[-1].sums == parameters // 2  # of bf16, by copy engines
    keys = ["model.copy_engine_collectives=False", "model.enable_cuda_graph=False"]
    whole = planned(*ranks, *keys, "model.optim.name=distributed_fused_adam", world=4).memory
    assert (whole.persistent.weights, whole.persistent.main_weights) == (2 * parameters, parameters)
    assert whole.persistent.gradient_sums == 4 * parameters  # summed over ranks in fp32
    assert whole.moments[-1].gradients == 0  # they leave for the sums at once
    grad = ["model.fsdp=True", "model.fsdp_sharding_strategy=grad"]
    for micro_batches in (1, 2):
        batch = f"model.global_batch_size={16 * micro_batches}"
        shards = planned(*ranks, batch, *grad, world=4).memory
        assert (shards.persistent.weights, shards.persistent.optimizer) == (2 * parameters, 2 * parameters)
        # the shards of one micro batch come into being in its backward pass, sums of several are there before
        assert shards.persistent.gradient_sums == (parameters if micro_batches > 1 else 0)
        assert shards.moments[-1].sums == (0 if micro_batches > 1 else parameters)


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        ([], 45.902),
        (["model.fsdp_grad_reduce_dtype=bf16"], 41.381),
        (["model.optim.name=distributed_fused_adam"], 39.128),
        (["model.optim.name=distributed_fused_adam", "model.fsdp_grad_reduce_dtype=bf16"], 34.607),
        (["model.fsdp=True"], 33.829),
    ],
)
def test_layouts_differ_as_measured(overrides, measured):
    """Against one GPU, by NCCL: docs/results/data_parallel.jsonl, before values were copied out of projections."""
    base = planned(LLAMA).allocated / GIB
    ranks = ["model.global_batch_size=8", "trainer.devices=2", "model.copy_engine_collectives=False"]
    plan = planned(LLAMA, *ranks, *overrides, world=2)
    assert plan.allocated / GIB - base == pytest.approx(measured - 41.444, abs=0.25)


def test_modes_need_less_in_their_order():
    modes = [[], ["model.activations_checkpoint_modules=[norm]"]]
    modes += [["model.activations_checkpoint_modules=[norm,mlp_activation]"], FULL]
    peaks = [planned(LLAMA, *mode).allocated for mode in modes]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    block = [
        planned(LLAMA, *FULL[:1], "model.activations_checkpoint_method=block", f"{FULL[2][:-1]}{n}") for n in (6, 18)
    ]
    assert peaks[0] > block[0].allocated > block[1].allocated


def test_scores_are_kept_by_unfused_attention_alone():
    unfused = [LLAMA, "model.attention_backend=unfused", "model.micro_batch_size=1", "model.global_batch_size=1"]
    selective = "model.activations_checkpoint_granularity=selective"
    scores, log_sum_exps = 24 * 16 * 4096**2 * 2, 24 * 16 * 4096 * 4
    saved = planned(*unfused).memory.moments[0].activations - planned(*unfused, selective).memory.moments[0].activations
    assert saved == scores - log_sum_exps  # from which the scores are made again
    dropped = [*unfused, "model.attention_dropout=0.1"]
    saved = planned(*dropped).memory.moments[0].activations - planned(*dropped, selective).memory.moments[0].activations
    assert saved == scores * 2  # before and after dropout, whose mask is not saved
    fused = [*unfused, "model.attention_backend=auto"]
    assert planned(*fused).allocated == planned(*fused, selective).allocated


def test_the_gradient_of_a_decoders_embeddings_waits_for_that_of_the_encoder():
    """Of one table for both; that of the head, where it is the same table too, waits already."""
    t5 = ["model=t5_v1_1_base", "data=mock", "model.override_vocab_size=32000", "trainer=gpu"]
    shared, tied = (
        {moment.where: moment for moment in planned(*t5, *more).memory.moments}
        for more in ([], ["model.share_decoder_tokens_head_embeddings=True"])
    )
    table = 32000 * 768 * 2
    encoder = "layer 11 of the encoder, backward"
    assert shared[encoder].working - tied[encoder].working == table
    assert shared[encoder].gradients == tied[encoder].gradients
    assert shared["the embeddings of the decoder, backward"].working >= table
    wide = [*t5, "model.megatron_amp_O2=False", "model.micro_batch_size=1", "model.global_batch_size=2"]
    for tied in (False, True):  # where it is added to that of the micro batch before, which is there already
        key = f"model.share_decoder_tokens_head_embeddings={tied}"
        moments = {moment.where: moment for moment in planned(*wide, key).memory.moments}
        last = moments["the embeddings, backward"]
        assert last.gradients == moments[encoder].gradients  # of all parameters
        assert 2 * 2 * table <= last.working <= 2.2 * 2 * table
        assert moments[encoder].working >= 2 * table


def test_offloaded_layers_are_on_the_host_at_the_loss():
    plan, offloaded = planned(LLAMA), planned(LLAMA, *OFFLOAD)
    layer = plan.memory.layers[0]
    at_loss = plan.memory.moments[0], offloaded.memory.moments[0]
    gone = at_loss[0].activations - at_loss[1].activations
    assert gone == pytest.approx(12 * layer.saved_bytes, rel=0.01)
    assert at_loss[1].offloaded_weights == 12 * layer.memory.num_parameters * 2
    kept = offloaded.memory.layers[0].saved_bytes  # norms and activations are made again, and moved nowhere
    assert (
        kept
        == planned(LLAMA, "model.activations_checkpoint_modules=[norm,mlp_activation]").memory.layers[0].saved_bytes
    )
    assert kept < 0.75 * layer.saved_bytes
    sent = 12 * kept + at_loss[1].offloaded_weights
    assert sent <= offloaded.on_host <= sent + GIB
    assert offloaded.on_host % GIB == 0  # it is pinned in slabs
    kept_weights = planned(LLAMA, *OFFLOAD, "model.cpu_offloading_weights=False")
    assert kept_weights.memory.moments[0].offloaded_weights == 0


def test_the_optimizers_state_can_be_on_the_host():
    plan = planned(LLAMA, "model.cpu_offloading_optimizer=True")
    assert plan.memory.persistent.on_host == 12 * plan.num_parameters
    assert plan.memory.persistent.main_weights == 0
    assert planned(LLAMA).allocated - plan.allocated > 11 * plan.num_parameters


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("overrides", [[LLAMA], ["experiment=t5_bench"], ["experiment=moe_bench"]])
def test_products_and_attention_are_the_model_flops(overrides):
    plan = planned(*overrides)
    facts = plan.inputs
    forward = 0.0
    for layer in layers_in_order(facts):
        forward += layer.memory.matmul_flops
        forward += attention_core_work(layer.stack).attention
    hidden = facts.stacks[-1].stack.hidden_size
    forward += 2 * facts.output_tokens * hidden * facts.family.padded_vocab_size
    samples = facts.model_config.micro_batch_size
    expected = samples * training_flops_per_sample(facts.model_config, facts.family.padded_vocab_size, facts.batch_spec)
    assert 3 * forward == pytest.approx(expected, rel=2e-3)


def test_measured_steps_are_met():
    """docs/benchmarks.md and docs/results, of an H100."""
    time = planned(LLAMA, card="h100").time
    assert time is not None
    assert time.tokens_per_second == pytest.approx(64_307, rel=0.03)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    for seconds, *overrides in (
        (0.3146, LLAMA, *FULL),
        (0.3128, LLAMA, *ONE, "model.encoder_seq_length=14336"),
        (10.79, LLAMA, *ONE, *FULL, "model.encoder_seq_length=106496"),
        (0.2035, "experiment=llama_1b_lora"),
        (0.0745, "experiment=t5_bench"),
        (0.1282, "experiment=moe_bench"),
        (0.1214, "experiment=moe_bench", "trainer.precision=bf16-true"),
    ):
        assert planned(*overrides, card="h100").seconds == pytest.approx(seconds, rel=0.05), overrides


def test_fp16_takes_what_bf16_does_and_pure_fp16_has_fp32_moments():
    bf16, fp16, pure, mixed = (
        planned(LLAMA, f"trainer.precision={name}", card="h100") for name in ("bf16", "16", "16-true", "16-mixed")
    )
    assert (fp16.seconds, fp16.memory.persistent) == (bf16.seconds, bf16.memory.persistent)
    held = pure.memory.persistent
    assert (held.main_weights, held.optimizer) == (0, bf16.memory.persistent.optimizer)
    assert mixed.memory.persistent.weights == 2 * held.weights
    wide = planned(LLAMA, "trainer.precision=16", "model.fp32_residual_connection=true", card="h100")
    inputs = wide.inputs.stacks[0]
    assert wide.memory.peak.total - fp16.memory.peak.total >= 16 * 2 * inputs.residual_elements  # inputs of the layers


def test_a_card_that_waits_for_the_host_is_told_of():
    """T5 base, micro batch 16, beside an H100: 97 ms as launched one by one, 32 ms recorded."""
    small = ["model=t5_base", "model.global_batch_size=16", "model.micro_batch_size=16"]
    plan, recorded = planned(*small, "model.enable_cuda_graph=False"), planned(*small)
    (told,) = (line for line in summary_lines(plan) if "model.enable_cuda_graph=null" in line)
    assert plan.seconds == pytest.approx(0.097, rel=0.15)
    assert f"a step takes about {recorded.seconds * 1e3:,.0f} ms" in told
    assert told.removeprefix("plan: ") in "\n".join(report_lines(plan, []))
    for other in (recorded, planned(LLAMA)):
        assert not any("enable_cuda_graph" in line for line in summary_lines(other))


@pytest.mark.parametrize("model", [["model=t5_base"], ["experiment=moe_bench", "model.expert_model_parallel_size=2"]])
def test_layers_of_several_processes_are_captured(model):
    keys = [*model, "trainer.devices=2", "model.micro_batch_size=2", "model.global_batch_size=8"]
    eager, captured = (planned(*keys, *more, world=2) for more in (["model.enable_cuda_graph=False"], []))
    told = ["model.enable_cuda_graph=null" in "\n".join(summary_lines(plan)) for plan in (eager, captured)]
    assert told == [True, False]
    assert ["layers as CUDA graphs" in "\n".join(report_lines(plan, [])) for plan in (eager, captured)] == [False, True]
    waiting = [plan.time.parts["waiting for the host"] for plan in (eager, captured) if plan.time is not None]
    assert waiting[1] < 0.7 * waiting[0]
    # beside their fp32 sums, gradients of captured layers stay; the peak of experts is before they are computed
    assert (captured.memory.peak.total > eager.memory.peak.total) == ("model=t5_base" in model)


def test_a_small_model_takes_the_time_of_its_host():
    """Four layers of width 128: 4.1 ms as a CUDA graph and 15.4 ms without, compiled (H100, docs/benchmarks.md)."""
    small = ["model=gpt_tiny", "data=mock", "model.compile=true"]
    recorded, plain = planned(*small), planned(*small, "model.enable_cuda_graph=False")
    assert recorded.time is not None
    working = recorded.seconds - recorded.time.parts["waiting for the host"]
    assert working >= 4 * EFFICIENCY["gpu_seconds"], "kernels do not end sooner than they start"
    assert recorded.seconds == pytest.approx(0.0041, rel=0.1)
    assert plain.seconds == pytest.approx(0.0154, rel=0.1)
    assert [", as CUDA graphs" in "\n".join(report_lines(plan, [])) for plan in (recorded, plain)] == [True, False]


def test_the_host_exchanges_each_layer_of_data_parallel_ranks():
    """GPT-2 with micro batch 8 on 4 H100, layers as CUDA graphs: 27.5 ms (docs/benchmarks.md)."""
    keys = ["model=gpt2_124m", "data=mock", "model.hidden_dropout=0", "model.attention_dropout=0", "model.compile=true"]
    keys += ["model.micro_batch_size=8", "model.global_batch_size=32", "trainer.devices=4"]
    zero1 = "model.optim.name=distributed_fused_adam"
    assert planned(*keys, zero1, world=4).seconds == pytest.approx(0.0275, rel=0.1)
    # ZeRO-2 exchanges gradients in every micro batch
    eager = [*keys, "model.enable_cuda_graph=False", "model.global_batch_size=64"]
    optimizer, gradients = (
        planned(*eager, *more, world=4) for more in ([zero1], ["model.fsdp=True", "model.fsdp_sharding_strategy=grad"])
    )
    exchange = EFFICIENCY["host_bucket"] * EFFICIENCY["host_seconds_compiled"]
    assert gradients.seconds - optimizer.seconds == pytest.approx(12 * exchange, rel=0.1)


def test_narrow_heads_are_slower_than_their_flops():
    wide, narrow = (planned(LLAMA, f"model.num_attention_heads={heads}").time for heads in (16, 32))
    assert wide is not None
    assert narrow is not None
    assert narrow.parts["attention"] == pytest.approx(wide.parts["attention"] / EFFICIENCY["narrow_heads"])


def test_full_recompute_is_a_forward_pass_without_the_last_product():
    plan = planned(LLAMA, *FULL)
    layer = plan.memory.layers[0]
    matmul, last = layer.memory.matmul_flops, layer.memory.last_matmul_flops
    assert recompute_work(layer).matmul == matmul - last
    assert plan.time is not None
    assert 1.15 < plan.time.seconds / planned(LLAMA).seconds < 1.30
    in_chunks = planned(LLAMA, *FULL[:2], "model.activations_checkpoint_num_layers=4").memory.layers[0]
    assert recompute_work(in_chunks).matmul == matmul


def test_copies_cost_what_does_not_fit_beside_the_computation():
    few = planned(LLAMA, "model.cpu_offloading=True", "model.cpu_offloading_num_layers=2").time
    many = planned(LLAMA, *OFFLOAD).time
    assert few is not None
    assert many is not None
    assert few.parts["copies not hidden"] == 0
    assert many.parts["copies not hidden"] > 0
    assert many.sent == pytest.approx(6 * few.sent, rel=1e-6)


# ---------------------------------------------------------------- cards


def test_cards_are_named_sized_or_both():
    assert parse_gpu("h200").memory > parse_gpu("H100").memory
    assert parse_gpu("80GiB") == replace(parse_gpu("h100"), memory=80 * GIB)  # and so measured, as its name says
    assert parse_gpu("a100:40GB").memory == 40 * 10**9
    assert parse_gpu("a100:40GB").capability == (8, 0)
    for name in GPU_NAMES:
        assert parse_gpu(name).peak, name
    for wrong in ("h300", "h300:80GiB", "0GiB", "80", ""):
        with pytest.raises(ValueError, match="`--device`"):
            parse_gpu(wrong)


def test_a_card_here_has_the_speeds_of_its_kind():
    card = match_gpu("NVIDIA H100 80GB HBM3", 123, (9, 0))
    assert (card.memory, card.measured, card.bandwidth) == (123, True, parse_gpu("h100").bandwidth)
    unknown = match_gpu("NVIDIA Something", 456, (9, 0))
    assert (unknown.name, unknown.memory, unknown.measured, unknown.peak) == ("NVIDIA Something", 456, False, None)
    assert planned(LLAMA).time is not None
    root = load(LLAMA).root
    assert make_plan(root, replace(gpu_target(root, parse_gpu("h200")), gpu=unknown)).time is None


# ---------------------------------------------------------------- the verb


def test_the_verb_tells_what_a_run_takes(capsys):
    assert main(["plan", LLAMA, "--device", "h200"]) == EXIT_OK
    out = capsys.readouterr().out
    assert "1,213,302,784 parameters" in out
    assert "the peak: the loss" in out
    assert "fits, with" in out
    assert "tokens/s" in out


def test_the_verb_gives_json(capsys):
    assert main(["plan", LLAMA, "--device", "24GiB", "--json"]) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["memory"]["allocated"] == sum(told["memory"]["at_peak"].values())
    assert told["changes"][0]["fits"] is True
    assert told["time"]["model_flops"] > 1e14


def test_fit_prints_overrides_or_the_nearest_miss(capsys):
    assert main(["plan", LLAMA, *ONE, "--device", "h200:20GiB", "--fit"]) == EXIT_OK
    assert "model.activations_checkpoint" in capsys.readouterr().out
    assert main(["plan", LLAMA, "--device", "h200:3GiB", "--fit"]) == EXIT_BAD_INPUT
    assert "nothing fits; nearest" in capsys.readouterr().out
    assert main(["plan", LLAMA, "--device", "h200", "--fit"]) == EXIT_OK
    assert "as it is" in capsys.readouterr().out


def test_an_unknown_card_is_refused_in_one_line(capsys):
    assert main(["plan", LLAMA, "--device", "h300"]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "`--device` (h300)" in error
    assert error.count("\n") == 1


# ---------------------------------------------------------------- in a run


def test_a_failed_allocation_names_the_keys_that_help():
    root = load(LLAMA, *ONE).root
    target = gpu_target(root, parse_gpu("h200:20GiB"))
    plan = make_plan(root, target)
    with pytest.raises(UserError) as error, report_out_of_memory(root, torch.device("cuda"), plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    lines = error.value.lines
    assert lines[0].startswith("out of memory on cuda: CUDA out of memory")
    assert "of 20.0 GiB" in lines[1]
    assert any("model.activations_checkpoint_modules=" in line and "GiB (-" in line for line in lines)
    with pytest.raises(UserError) as error, report_out_of_memory(root, torch.device("cuda"), plan):
        torch.empty(2**50, dtype=torch.uint8)
    assert error.value.lines[0].startswith("out of host memory: ")
    assert len(error.value.lines) == 2, "none of the keys that help a device"
    with (
        pytest.raises(UserError, match="out of host memory"),
        report_out_of_memory(root, torch.device("cuda"), plan),
    ):
        raise MemoryError
    assert out_of_memory_lines(root, None) == [
        "use a smaller model.micro_batch_size, shorter samples or a smaller model"
    ]


def test_the_summary_and_what_was_measured():
    plan = planned(LLAMA)
    lines = summary_lines(plan)
    assert lines[0].startswith(f"plan: {plan.allocated / GIB:.1f} GiB at the peak (the loss): activations")
    assert "tokens/s" in lines[1]
    assert "warning" in summary_lines(planned(LLAMA, card="24GiB"))[1]
    told = measured_line(plan, round(plan.allocated / 1.1), plan.reserved)
    assert "+10.0 %" in told
    assert "+0.0 %" in told


# ---------------------------------------------------------------- what a review found


def test_the_verb_tells_warnings_and_what_does_nothing(capsys):
    selective = "model.activations_checkpoint_granularity=selective"
    unheard = "model.activations_checkpoint_method=uniform"
    assert main(["plan", LLAMA, "--device", "h200", selective, unheard]) == EXIT_OK
    out = capsys.readouterr().out
    assert "`activations_checkpoint_method` (uniform) has no effect" in out
    assert "recomputing core attention has no effect" in out
    assert "recomputes nothing" in out
    assert main(["plan", LLAMA, "--device", "h200", "--json", selective, unheard]) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert told["findings"]
    assert "core attention" in told["notes"][0]


def test_a_run_on_the_host_is_not_planned_for_a_card_in_silence(capsys):
    assert main(["plan", LLAMA, "--json"]) == EXIT_OK
    here = "no CUDA device is available; this plan is for an NVIDIA H100 80GB HBM3; choose another with --device"
    assert json.loads(capsys.readouterr().out)["notes"] == ([] if torch.cuda.is_available() else [here])
    assert main(["plan", LLAMA, "trainer.accelerator=cpu", "--json"]) == EXIT_OK
    assert "`trainer.accelerator` (cpu)" in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize(
    "key", ["model.cpu_offloading", "model.cpu_offloading_optimizer", "exp_manager.ema.cpu_offload"]
)
def test_offloading_that_does_nothing_here_is_one_note(capsys, accelerator, key):
    """The plan is for a GPU, where it acts: a warning that it does not would contradict the lines above it."""
    if accelerator == "auto" and torch.cuda.is_available():
        pytest.skip("the plan is for this machine")
    ema = ["exp_manager.ema.enable=True"] if "ema" in key else []
    keys = ["model=gpt_tiny", "data=mock", f"trainer.accelerator={accelerator}", f"{key}=True", *ema]
    assert main(["plan", *keys, "--json"]) == EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert not any("no effect" in found["message"] for found in told["findings"])
    (note,) = (note for note in told["notes"] if "no effect" in note)
    assert f"where `{key}` (True) has no effect; this plan is for an NVIDIA H100" in note
    assert {"cpu": "trains on the host", "auto": "a run here uses the CPU"}[accelerator] in note
    assert main(["config", *keys]) == EXIT_OK
    warned = capsys.readouterr().err
    assert (f"{key.rpartition('.')[2]}` has no effect" in warned) == (accelerator == "cpu" and not ema)


def test_auto_is_every_gpu_of_the_machine(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(["plan", LLAMA, "model.global_batch_size=16", "--device", "h200", "--json"]) == EXIT_OK
    one = json.loads(capsys.readouterr().out)["processes"]
    many = [LLAMA, "model.global_batch_size=16", "trainer.devices=auto"]
    assert main(["plan", *many, "--device", "h200", "--json"]) == EXIT_OK
    assert (one, json.loads(capsys.readouterr().out)["processes"]) == (1, 4)


def test_wide_numbers_have_no_time_at_the_peak_of_narrow_ones():
    assert planned(LLAMA, "trainer.precision=32").time is None
    assert planned(LLAMA, "trainer.precision=bf16-mixed").time is not None


def test_selective_takes_the_time_of_what_it_makes_again():
    """docs/benchmarks.md: unfused attention at 108.2 ms a step, at 97.0 where scores come again from log-sum-exps."""
    selective = "model.activations_checkpoint_granularity=selective"
    assert planned(LLAMA, selective).seconds == planned(LLAMA).seconds
    unfused = [LLAMA, *ONE, "model.attention_backend=unfused"]
    none, again = (planned(*unfused, *more, card="h100").seconds for more in ([], [selective]))
    assert none == pytest.approx(0.1082, rel=0.06)
    assert again / none == pytest.approx(97.0 / 108.2, rel=0.02)
    dropped = [*unfused, "model.attention_dropout=0.1"]
    assert planned(*dropped, selective).seconds > planned(*dropped).seconds


@looped(
    ("name", "memory", "like", "teraflops", "measured"),
    [
        ("NVIDIA H200", 139, "h200", 989, False),
        ("NVIDIA H200 NVL", 139, "h200", 835.5, False),
        ("NVIDIA H100 80GB HBM3", 79, "h100", 989, True),
        ("NVIDIA H100 PCIe", 79, "h100-pcie", 756, False),
        ("NVIDIA H100 NVL", 93, "h100", 835.5, False),
        ("NVIDIA H800", 79, "h100", 989, False),
        ("NVIDIA H20", 95, "h100", 148, False),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40", 312, False),
        ("NVIDIA A100-SXM4-80GB", 79, "a100", 312, False),
        ("NVIDIA A40", 44, "a10", 149.7, False),
        ("NVIDIA L40S", 44, "l40s", 362.05, False),
    ],
)
def test_a_card_is_the_one_whose_name_says_most(name, memory, like, teraflops, measured):
    capability = {"A100": (8, 0), "A40": (8, 6), "L40": (8, 9)}
    known = next((value for key, value in capability.items() if key in name), (9, 0))
    card, table = match_gpu(name, memory * GIB, known), parse_gpu(like)
    assert (card.bandwidth, card.host_link) == (table.bandwidth, table.host_link)
    assert card.peak == pytest.approx(teraflops * 1e12)
    assert card.measured is measured


def test_sizes_of_cards():
    assert parse_gpu("1TiB").memory == 2**40
    with pytest.raises(ValueError, match="`--device`"):
        parse_gpu("h100:")


def test_weights_of_chunks_come_back_with_the_chunk_after_them():
    """Against `models.offload_weights` with copies that are counted: layers whose weights are away."""

    def away(layers, chunk, offloaded):
        plan = planned(
            *(LLAMA, *FULL[:2], f"model.num_layers={layers}", f"model.activations_checkpoint_num_layers={chunk}"),
            *("model.cpu_offloading=True", f"model.cpu_offloading_num_layers={offloaded}"),
        )
        each = plan.memory.layers[0].memory.num_parameters * 2
        at = {moment.where: moment.offloaded_weights // each for moment in plan.memory.moments}
        return [at["the loss"], *(at[f"layer {number}, backward"] for number in reversed(range(layers)))]

    assert away(9, 3, 5) == [5, 3, 3, 3, 0, 0, 0, 0, 0, 0]
    assert away(9, 3, 8) == [6, 3, 3, 3, 0, 0, 0, 0, 0, 0]
    assert away(8, 1, 5) == [5, 5, 5, 4, 3, 2, 1, 0, 0]


def test_what_the_last_chunk_keeps_does_not_leave():
    chunks = [LLAMA, *FULL[:2], "model.num_layers=9", "model.activations_checkpoint_num_layers=3"]
    offload = ["model.cpu_offloading=True", "model.cpu_offloading_weights=False"]
    plan = planned(*chunks, *offload, "model.cpu_offloading_num_layers=8")
    at = {moment.where: moment.activations for moment in plan.memory.moments}
    chunk = plan.memory.layers[0].saved_bytes
    assert planned(*chunks).memory.moments[0].activations - at["the loss"] == 2 * chunk
    # the chunk before comes as soon as the backward reaches a chunk, not when it has left it
    assert at["layer 8, backward"] - at["layer 0, backward"] == chunk


@pytest.mark.parametrize(
    ("overrides", "slots"),
    [
        (["model.optim.name=muon"], 528),
        (["model.optim.name=adamw", "model.optim.scale_parameter=true"], 1764),
        (["model.optim.name=adafactor"], 588),
    ],
)
def test_slots_are_those_of_the_buckets(overrides, slots):
    """MiB: the slots of the optimizer itself over the same parameters."""
    facts = planned("model=llama_1b", "model.num_layers=4", "model.cpu_offloading_optimizer=true", *overrides).inputs
    assert offload_bucket_bytes(facts) / 2**20 == pytest.approx(slots, rel=0.01)


def test_combinations_are_searched():
    long = ["model=llama_1b", "model.encoder_seq_length=131072", "model.max_position_embeddings=131072", *ONE]
    root = load(*long).root
    by_hand = [*FULL, *OFFLOAD[:1], "model.cpu_offloading_weights=False", "model.cpu_offloading_num_layers=20"]
    with_both = planned(*long, *by_hand, "model.cpu_offloading_optimizer=true")
    target = gpu_target(root, parse_gpu(f"h200:{with_both.needed // 2**20 + 1}MiB"))
    best, _ = search(root, target, make_plan(root, target))
    assert best is not None
    assert best.plan.fits
    ranks = ["model=llama_1b", "model.global_batch_size=64", "trainer.devices=4", "model.micro_batch_size=1"]
    root = load(*ranks).root
    plan = make_plan(root, gpu_target(root, parse_gpu("h200")), world_size=4)
    _, least = search(root, gpu_target(root, parse_gpu("3GiB")), plan)
    assert {"fsdp", "cpu_offloading_optimizer"} <= set(least.values)


def test_nothing_is_suggested_that_does_nothing_here():
    sparse = planned("model=mixtral_tiny")
    assert effective_modules(sparse) == ["norm", "moe"]
    assert effective_modules(planned(LLAMA)) == ["norm", "mlp_activation"]
    assert effective_modules(planned(LLAMA, "model.attention_backend=unfused"))[0] == "core_attention"


def test_suggestions_say_where_to_look_when_none_is_enough():
    root = load(LLAMA).root
    target = gpu_target(root, parse_gpu("h200:7GiB"))
    plan = make_plan(root, target)
    changes = suggest_changes(root, target, plan)
    assert not any(change.plan.fits for change in changes)
    lines = list(report_lines(plan, changes))
    assert any("plan --fit" in line for line in lines)
    assert any("on the host" in line for line in lines)
    warned = [finding for change in changes for finding in load(LLAMA, *change.overrides()).findings]
    assert not [finding for finding in warned if finding.level == "warning"]


def test_what_the_host_has_not_does_not_fit():
    root = load(LLAMA, *OFFLOAD).root
    target = gpu_target(root, parse_gpu("h200"))
    plan = make_plan(root, target)
    assert plan.fits
    short = make_plan(root, replace(target, host_memory=plan.on_host - GIB))
    assert short.fits is False
    assert short.missing_host_memory == GIB
    assert any("1.0 GiB more host memory" in line for line in report_lines(short, []))
    assert any("1.0 GiB more host memory" in line for line in summary_lines(short))
    best, _ = search(root, short.inputs.target, short)
    assert best is not None
    assert best.plan.on_host < plan.on_host


@pytest.mark.parametrize(
    ("targets", "normalization", "told"),
    [
        ("all", "rmsnorm", {"mlp_activation", "norm"}),
        ("all", "layernorm", {"mlp_activation", "saves memory"}),
        ("attention", "rmsnorm", {"norm"}),
        ("attention", "layernorm", set()),
    ],
)
def test_what_lora_does_not_keep_is_told(
    capsys: pytest.CaptureFixture[str], targets: str, normalization: str, told: set[str]
) -> None:
    common = [f"model.normalization={normalization}", f"model.peft.lora_tuning.target_modules=[{targets}]"]
    lines = {
        "mlp_activation": "recomputing mlp_activation has no effect where LoRA updates both projections",
        "norm": "recomputing norm has no effect in compiled layers where LoRA",
        "saves memory": "activations_checkpoint_modules=[norm] saves memory",
    }
    said = ""
    for module in ("mlp_activation", "norm"):
        asked = [*common, f"model.activations_checkpoint_modules=[{module}]"]
        assert main(["plan", "experiment=llama_1b_lora", "--device", "h100", *asked]) == 0
        said += capsys.readouterr().out
    assert {name for name, line in lines.items() if line in said} == told
