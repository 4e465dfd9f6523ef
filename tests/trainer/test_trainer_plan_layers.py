"""Planned activations of layers, beside what torch saves: as written, and compiled."""

from collections import Counter

import pytest
import torch
from deferred_copies import DeferredCopies
from saved_activations import (
    backward_peak_bytes,
    loss_peak_bytes,
    model_of,
    plan_inputs,
    saved_and_sent_compiled,
    saved_compiled,
    saved_eager,
)
from tiers import cases, extra, full_only, spread

from stoker.models.build import TORCH_DTYPES
from stoker.models.layer_cost import layer_traffic
from stoker.models.layers import recomputed_attention
from stoker.models.memory.offload_activations import ActivationOffload
from stoker.trainer.plan import timeline
from stoker.trainer.plan.layers import layers_in_order
from stoker.trainer.plan.timeline import loss_memory, memory_plan
from stoker.trainer.plan.transfers import offloaded_bytes

pytestmark = pytest.mark.usefixtures("own_components")

SMALL = [
    "trainer.precision=bf16",
    "model.hidden_size=256",
    "model.num_attention_heads=8",
    "model.ffn_hidden_size=704",
    "model.encoder_seq_length=136",
    "model.num_layers=2",
    "model.micro_batch_size=3",
    "model.global_batch_size=3",
    "model.override_vocab_size=64",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
]
LLAMA = ["model=llama_1b", *SMALL, "model.num_query_groups=2"]
GPT3 = ["model=gpt3_1b", *SMALL]
RECOMPUTE = "model.activations_checkpoint"
RESIDUAL = "model.fp32_residual_connection=true"
WHOLE = [f"{RECOMPUTE}_granularity=full"]
MOE = [*LLAMA, "model.num_moe_experts=4", "model.moe_router_topk=2"]
LORA = [*LLAMA, "peft=lora", "model.peft.lora_tuning.adapter_dim=4"]
T5 = [
    "model=t5_v1_1_base",
    "trainer.precision=bf16",
    "data=mock",
    "model.seq_length=152",
    "model.data.seq_length_dec=72",
    "model.micro_batch_size=3",
    "model.global_batch_size=3",
    "model.override_vocab_size=128",
    *(
        f"model.{part}.{key}"
        for part in ("encoder", "decoder")
        for key in ("num_layers=2", "hidden_size=256", "num_attention_heads=8", "kv_channels=40", "ffn_hidden_size=704")
    ),
]
CASES = {
    "llama": LLAMA,
    "gpt3": GPT3,
    "gpt3 dropout": [*GPT3, "model.hidden_dropout=0.1", "model.ffn_dropout=0.1"],
    "fp32 residual": [*LLAMA, RESIDUAL],
    "fp32 residual, gpt3 dropout": [*GPT3, "model.hidden_dropout=0.1", RESIDUAL],
    "fp32 residual, parallel": [*LLAMA, "model.transformer_block_type=parallel_ln", RESIDUAL],
    "fp32 residual, experts": [*MOE, RESIDUAL],
    "fp32 residual, lora": [*LORA, RESIDUAL],
    "fp32 residual, norms again": [*LLAMA, RESIDUAL, f"{RECOMPUTE}_modules=[norm]"],
    "fp32 residual, normformer": [*LLAMA, "model.transformer_block_type=normformer", RESIDUAL],
    "post-norm": [*LLAMA, "model.transformer_block_type=post_ln"],
    "normformer": [*LLAMA, "model.transformer_block_type=normformer", "model.headscale=True"],
    "norms of heads": [*LLAMA, "model.qk_layernorm=True"],
    "centred norm, squared relu": [*LLAMA, "model.normalization=layernorm1p", "model.activation=squared-relu"],
    "relu": [*LLAMA, "model.activation=relu"],
    "relu, dropout": [*LLAMA, "model.activation=relu", "model.ffn_dropout=0.1"],
    "relu, normformer": [*LLAMA, "model.activation=relu", "model.transformer_block_type=normformer"],
    "relu again": [*LLAMA, "model.activation=relu", f"{RECOMPUTE}_modules=[mlp_activation]"],
    "relu again, dropout": [
        *LLAMA,
        "model.activation=relu",
        "model.ffn_dropout=0.1",
        f"{RECOMPUTE}_modules=[mlp_activation]",
    ],
    "sigmoid gelu": [*LLAMA, "model.activation=approx-gelu"],
    "sigmoid gelu again": [*LLAMA, "model.activation=approx-gelu", f"{RECOMPUTE}_modules=[mlp_activation]"],
    "gelu and dropout again": [*GPT3, "model.ffn_dropout=0.1", f"{RECOMPUTE}_modules=[mlp_activation]"],
    "parallel": [*LLAMA, "model.transformer_block_type=parallel_ln"],
    "parallel, gpt3": [*GPT3, "model.transformer_block_type=parallel_ln"],
    "parallel, cheap parts again": [
        *LLAMA,
        "model.transformer_block_type=parallel_ln",
        f"{RECOMPUTE}_modules=[norm,mlp_activation]",
    ],
    "parallel, cheap parts again, gpt3": [
        *GPT3,
        "model.transformer_block_type=parallel_ln",
        f"{RECOMPUTE}_modules=[norm,mlp_activation]",
    ],
    "unfused": [*LLAMA, "model.attention_backend=unfused"],
    "unfused, dropout": [*LLAMA, "model.attention_backend=unfused", "model.attention_dropout=0.1"],
    "unfused, bound": [*LLAMA, "model.attention_backend=unfused", "model.attn_logit_softcapping=30"],
    "unfused, sinks": [*LLAMA, "model.attention_backend=unfused", "model.softmax_type=learnable"],
    "sinks": [*LLAMA, "model.attention_backend=triton", "model.softmax_type=learnable"],
    "unfused, norms of heads": [*LLAMA, "model.attention_backend=unfused", "model.qk_layernorm=True"],
    "unfused, norms of heads, gpt3": [*GPT3, "model.attention_backend=unfused", "model.qk_layernorm=True"],
    "math": [*LLAMA, "model.attention_backend=sdpa_math"],
    "reference": [*LLAMA, "model.attention_backend=reference"],
    "own activation": [*GPT3, "model.activation=own_mish", "model.openai_gelu=False", "model.ffn_dropout=0.1"],
    "own gate": [*LLAMA, "model.activation=own_mish-glu"],
    "own gate again": [*LLAMA, "model.activation=own_mish-glu", f"{RECOMPUTE}_modules=[norm,mlp_activation]"],
    "own gate of experts": [*MOE, "model.activation=own_mish-glu"],
    "own bias": [*LLAMA, "model.position_embedding_type=own_kerple"],
    "own block": [*LLAMA, "model.transformer_block_type=own_pre_ln"],
    "own block of a t5": [*T5, "model.transformer_block_type=own_pre_ln"],
    "kerple": [*LLAMA, "model.position_embedding_type=kerple"],
    "xpos": [*LLAMA, "model.position_embedding_type=xpos"],
    "autocast": [*LLAMA, "model.megatron_amp_O2=False"],
    "fp32": [*LLAMA, "trainer.precision=32", "model.attention_backend=triton"],
    "fp32, norms of heads": [
        *LLAMA,
        "trainer.precision=32",
        "model.attention_backend=triton",
        "model.qk_layernorm=True",
    ],
    "experts": MOE,
    "experts, losses": [*MOE, "model.moe_z_loss_coeff=0.001", "model.moe_aux_loss_coeff=0.01"],
    "experts, padded": [*MOE, "model.moe_expert_capacity_factor=1.0", "model.moe_pad_expert_input_to_capacity=True"],
    "experts, dropout": [*MOE, "model.moe_dropout=0.1", "model.moe_shared_expert_intermediate_size=96"],
    "experts, autocast": [*MOE, "model.megatron_amp_O2=False"],
    "experts, layernorm, autocast": [
        *MOE,
        "model.megatron_amp_O2=False",
        "model.normalization=layernorm",
        "model.activation=gelu",
        "model.bias=True",
    ],
    "t5": T5,
    "fp8": [*LLAMA, "model.fp8=True"],
    "fp8, rowwise": [*LLAMA, "model.fp8=True", "model.fp8_recipe=rowwise"],
    "fp8, blockwise": [*LLAMA, "model.fp8=True", "model.fp8_recipe=blockwise"],
    "fp8, last layer": [
        *LLAMA,
        "model.fp8=True",
        "model.first_last_layers_bf16=True",
        "model.num_layers_at_end_in_bf16=0",
    ],
    "fp8, gradients of weights in bf16": [*LLAMA, "model.fp8=True", "model.fp8_wgrad=False"],
    "fp8, autocast": [*LLAMA, "model.fp8=True", "model.megatron_amp_O2=False"],
    "fp8, gpt3": [*GPT3, "model.fp8=True"],
    "fp8, relu": [*LLAMA, "model.fp8=True", "model.activation=relu"],
    "fp8, normformer": [*LLAMA, "model.fp8=True", "model.transformer_block_type=normformer", "model.headscale=True"],
    "fp8, post-norm": [*LLAMA, "model.fp8=True", "model.transformer_block_type=post_ln"],
    "fp8, unfused": [*LLAMA, "model.fp8=True", "model.attention_backend=unfused"],
    "fp8, cheap parts again": [*LLAMA, "model.fp8=True", f"{RECOMPUTE}_modules=[norm,mlp_activation]"],
    "fp8, t5": [*T5, "model.fp8=True"],
    "fp8, layers again": [*LLAMA, "model.fp8=True", *WHOLE, f"{RECOMPUTE}_method=uniform", f"{RECOMPUTE}_num_layers=1"],
    "fp8 beside experts": [*MOE, "model.fp8=True", "model.moe_shared_expert_intermediate_size=96"],
    "fp8 experts": [*MOE, "model.fp8=True"],
    "fp8, blockwise experts": [*MOE, "model.fp8=True", "model.fp8_recipe=blockwise", "model.moe_ffn_hidden_size=640"],
    "fp8, lora": [*LORA, "model.fp8=True"],
    "lora": LORA,
    "lora, norms again": [*LORA, f"{RECOMPUTE}_modules=[norm]"],
    "lora of the first projections": [*LORA, "model.peft.lora_tuning.target_modules=[attention_qkv,mlp_fc1]"],
    "lora of attention": [*LORA, "model.peft.lora_tuning.target_modules=[attention]"],
    "lora beside experts": [*MOE, *LORA[len(LLAMA) :], "model.peft.lora_tuning.target_modules=[attention]"],
    "lora of experts, norms again": [*MOE, *LORA[len(LLAMA) :], f"{RECOMPUTE}_modules=[norm]"],
    "norms again": [*LLAMA, f"{RECOMPUTE}_modules=[norm]"],
    "cheap parts again": [*LLAMA, f"{RECOMPUTE}_modules=[norm,mlp_activation]"],
    "cheap parts again, gpt3": [*GPT3, f"{RECOMPUTE}_modules=[norm,mlp_activation]"],
    "scores again": [*LLAMA, "model.attention_backend=unfused", f"{RECOMPUTE}_modules=[core_attention]"],
    "scores again, norms of heads": [
        *LLAMA,
        "model.attention_backend=unfused",
        "model.qk_layernorm=True",
        f"{RECOMPUTE}_modules=[core_attention]",
    ],
    "scores again, dropout": [
        *LLAMA,
        "model.attention_backend=unfused",
        "model.attention_dropout=0.1",
        f"{RECOMPUTE}_modules=[core_attention]",
    ],
    "scores again, norms of heads, dropout": [
        *LLAMA,
        "model.attention_backend=unfused",
        "model.qk_layernorm=True",
        "model.attention_dropout=0.1",
        f"{RECOMPUTE}_modules=[core_attention]",
    ],
    "scores again, math": [*LLAMA, "model.attention_backend=sdpa_math", f"{RECOMPUTE}_modules=[core_attention]"],
    "scores again, reference": [*LLAMA, "model.attention_backend=reference", f"{RECOMPUTE}_modules=[core_attention]"],
    "experts, norms again": [*MOE, f"{RECOMPUTE}_modules=[norm]"],
    "experts and norms again": [*MOE, f"{RECOMPUTE}_modules=[moe,norm]"],
    "experts again with a shared one": [
        *MOE,
        "model.moe_shared_expert_intermediate_size=704",
        f"{RECOMPUTE}_modules=[moe]",
    ],
    "experts again": [*MOE, f"{RECOMPUTE}_modules=[moe]"],
    "layers again": [*LLAMA, *WHOLE, f"{RECOMPUTE}_method=uniform", f"{RECOMPUTE}_num_layers=1"],
    "first layer again": [*LLAMA, *WHOLE, f"{RECOMPUTE}_method=block", f"{RECOMPUTE}_num_layers=1"],
    "chunk again": [*LLAMA, *WHOLE, f"{RECOMPUTE}_method=uniform", f"{RECOMPUTE}_num_layers=2"],
}
QUICK = {
    "fp8",
    "own gate",
    "llama",
    "gpt3 dropout",
    "normformer",
    "norms of heads",
    "unfused, dropout",
    "autocast",
    "experts",
    "experts, dropout",
    "t5",
    "cheap parts again",
    "relu again",
    "parallel, cheap parts again, gpt3",
    "scores again, norms of heads",
    "layers again",
    "chunk again",
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if (name in QUICK or extra(name))
        and "lora" not in name  # of norms that are frozen nothing more is known than of others
    ],
)
def test_as_written_layers_keep_what_autograd_saves(name, monkeypatch):
    facts = plan_inputs(CASES[name], compiled=False)
    plan = memory_plan(facts)
    casts = sum(each.num_bytes for layer in plan.layers for each in layer.memory.saved if each.part == "weights")
    planned = plan.moments[0].activations - casts
    assert planned == pytest.approx(saved_eager(facts, monkeypatch), rel=0.03)


@full_only
@pytest.mark.parametrize("name", [name for name in CASES if name != "chunk again"])
def test_compiled_layers_keep_what_the_partitioner_chooses(name, monkeypatch):
    facts = plan_inputs(CASES[name], compiled=True)
    for number, stack in enumerate(facts.stacks):
        last = [layer for layer in layers_in_order(facts) if layer.stack is stack][-1]
        assert last.saved_bytes == pytest.approx(saved_compiled(facts, monkeypatch, stack=number), rel=0.03), stack.name


OPERATIONS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather_into_tensor",
    "reduce-scatter": "reduce_scatter_tensor",
}
SPLIT = (
    "llama",
    "fp8",
    "fp8, rowwise",
    "gpt3",
    "norms of heads",
    "autocast",
    "t5",
    "cheap parts again",
    "layers again",
    "kerple",
)


def split_inputs(name, sequence, *, compiled):
    keys = ["trainer.devices=2", "model.tensor_model_parallel_size=2", f"model.sequence_parallel={sequence}"]
    return plan_inputs([*CASES[name], *keys], compiled=compiled, ranks=2)


@pytest.mark.parametrize(("name", "sequence"), spread(cases(list(SPLIT), fast=2), (False, True)))
def test_layers_of_a_tensor_parallel_rank_keep_what_autograd_saves(name, sequence, monkeypatch):
    facts = split_inputs(name, sequence, compiled=False)
    plan = memory_plan(facts)
    casts = sum(each.num_bytes for layer in plan.layers for each in layer.memory.saved if each.part == "weights")
    planned = plan.moments[0].activations - casts
    assert planned == pytest.approx(saved_eager(facts, monkeypatch), rel=0.03)


@full_only
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", SPLIT)
def test_compiled_layers_of_a_tensor_parallel_rank_keep_what_the_partitioner_chooses(name, sequence, monkeypatch):
    facts = split_inputs(name, sequence, compiled=True)
    for number, stack in enumerate(facts.stacks):
        last = [layer for layer in layers_in_order(facts) if layer.stack is stack][-1]
        saved, sent = saved_and_sent_compiled(facts, monkeypatch, stack=number)
        assert last.saved_bytes == pytest.approx(saved, rel=0.03), stack.name
        planned = Counter()
        recomputes = last.recomputed_modules, last.is_recomputed
        is_fp8 = last.memory.inputs.fp8 is not None
        for each in layer_traffic(
            stack,
            is_moe=False,
            is_fp8=is_fp8,
            recomputes=recomputes[0],
            recomputed_layer=recomputes[1],
            ends_recompute=True,
        ):
            planned["forward" if each.during == "forward" else "backward", OPERATIONS[each.kind]] += each.num_bytes
        assert sent == planned, stack.name


@pytest.mark.parametrize(("name", "times"), [("scores again", 2), ("scores again, dropout", 0)])
def test_scores_come_again_from_log_sum_exps_where_the_plan_counts_these(name, times, monkeypatch):
    taken, function = [], recomputed_attention.attention_recompute_scores
    monkeypatch.setattr(
        recomputed_attention,
        "attention_recompute_scores",
        lambda *given, **more: taken.append(1) or function(*given, **more),
    )
    facts = plan_inputs(CASES[name], compiled=False)
    saved_eager(facts, monkeypatch)
    assert len(taken) == times  # in each layer, or in none
    stack = facts.stacks[0]
    scores = 2 * stack.batch * 8 * stack.length**2
    log_sum_exps = 4 * stack.tokens * 8
    for layer in layers_in_order(facts):
        assert layer.memory.attention.recompute_inputs == (log_sum_exps if times else 0)
        spared = layer.memory.attention.working - layer.memory.attention.working_recomputed
        assert spared == (scores if times else 0)  # the gradient of the weights
        again, working = layer.memory.backward_peak(frozenset({"core_attention"}))
        assert again >= scores
        assert working + (scores if times else 0) == layer.memory.backward_peak(frozenset())[1]


@pytest.mark.parametrize("micro_batch", cases([1, 2, 6], fast=1))
@pytest.mark.parametrize("precision", ["bf16", "32"])
def test_the_loss_takes_what_its_operation_makes(micro_batch, precision, monkeypatch):
    """With a vocabulary of 50,304 a chunk has 4,096 tokens: one chunk, one and a half of it, six."""
    sizes = [f"model.micro_batch_size={micro_batch}", f"model.global_batch_size={micro_batch}"]
    overrides = ["model=llama_1b", "data=mock", *sizes, f"trainer.precision={precision}"]
    length = 4096 if micro_batch != 2 else 3072
    facts = plan_inputs(
        [*overrides, "model.override_vocab_size=50304", f"model.encoder_seq_length={length}"], compiled=True
    )
    dtype = TORCH_DTYPES[facts.precision.weights]
    tokens, hidden = facts.output_tokens, facts.stacks[0].stack.hidden_size
    beside = loss_memory(facts).forward - tokens * hidden * dtype.itemsize
    assert beside == pytest.approx(loss_peak_bytes(tokens, 50304, hidden, dtype, monkeypatch), rel=0.001)


@pytest.mark.parametrize("precision", ["bf16", "32"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_gradient_of_a_wide_head_weighs_more_than_its_logits(chunks, precision, monkeypatch):
    """Hidden 6,144 and a vocabulary of 128,256, of which a chunk has 2,048 tokens."""
    vocab, hidden = 128_256, 6144
    wide = [f"model.hidden_size={hidden}", "model.num_attention_heads=48", f"model.override_vocab_size={vocab}"]
    sizes = ["model.micro_batch_size=1", "model.global_batch_size=1", f"model.encoder_seq_length={chunks * 2048}"]
    facts = plan_inputs(["model=llama_1b", "data=mock", *wide, *sizes, f"trainer.precision={precision}"], compiled=True)
    dtype, tokens = TORCH_DTYPES[facts.precision.weights], facts.output_tokens
    beside = loss_memory(facts).forward - tokens * hidden * dtype.itemsize
    assert beside == pytest.approx(loss_peak_bytes(tokens, vocab, hidden, dtype, monkeypatch), rel=0.001)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", *extra("unfused, dropout", "scores again", "chunk again")),
        *extra("fp32", "gpt3", "unfused, bound", "layers again"),
        *extra("relu, dropout", "relu again"),
    ],
)
def test_the_backward_pass_as_written_needs_what_is_planned(name, monkeypatch):
    facts = plan_inputs([*CASES[name], "model.num_layers=4"], compiled=False)
    planned = max(moment.total for moment in memory_plan(facts).moments if "backward" in moment.where)
    assert planned == pytest.approx(backward_peak_bytes(facts, monkeypatch), rel=0.06)


@full_only
def test_what_is_offloaded_is_where_the_engine_has_it(monkeypatch):
    """On the CPU, with plain operations, which a GPU has in the same form for this model."""
    keys = ["cpu_offloading=True", "cpu_offloading_num_layers=4", "cpu_offloading_weights=False", "num_layers=6"]
    facts = plan_inputs([*GPT3, *(f"model.{key}" for key in keys)], compiled=False)
    model, tokens = model_of(facts), torch.zeros(3, 136, dtype=torch.int64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    copies, held = DeferredCopies(), {}
    engine = ActivationOffload(copies, 4, least_size=1)
    model.decoder.activation_offload = engine
    for number, layer in enumerate(model.decoder.layers):
        layer.register_full_backward_pre_hook(lambda *_, number=number: held.update({number: copies.held}))
    loss = model.loss(tokens, tokens, 1.0)
    monkeypatch.setattr(timeline, "MIN_OFFLOAD_BYTES", 1)
    plan = memory_plan(facts)
    assert sum(map(offloaded_bytes, plan.layers)) == pytest.approx(engine.sent_bytes, rel=0.01)
    loss.backward()
    by_place = {moment.where: moment.activations for moment in plan.moments}
    for number in range(6):
        never_sent = sum(layer.saved_bytes for layer in plan.layers[4 : number + 1])
        there = by_place[f"layer {number}, backward"] - never_sent
        assert there == pytest.approx(held[number], rel=0.01), number
