"""torchtitan and Megatron-core in the cases of `parallel.py`: each with its own step, set up as its users do for speed.

torchtitan 0.2: its `Trainer` with compiled layers; fp32 weights, bf16 under FSDP or autocast, and pure bf16 in fp8 and
under tensor parallelism, where it has no mixed precision. Megatron-core: TransformerEngine layers, bf16 with fp32 main
weights, the distributed optimizer, gradients and weights exchanged behind the passes. Both draw random tokens, and
balance the load of experts by force.
`Step` is a whole optimizer step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rounds import Row
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing.spawn import spawn

if TYPE_CHECKING:
    from parallel import Case

Step = Callable[[], object]
VOCABULARY = 32000
GPT = {"layers": 24, "hidden": 2048, "heads": 16, "groups": 4, "ffn": 5632}
MOE = {"layers": 16, "hidden": 1024, "heads": 16, "groups": 8, "ffn": 3584, "experts": 8, "top_k": 2}


def shape(case: Case) -> dict[str, int]:
    """Return the geometry of `conf/model/llama_1b.yaml` or `gpt_moe_8x.yaml`."""
    return MOE if case.work.experiment == "moe_bench" else GPT


def micro_batches(case: Case, devices: int) -> int:
    """Return the micro batches of a data-parallel rank and step."""
    ranks = devices // (case.size("tensor", devices) * case.size("context", devices))
    return case.samples_per_step(devices) // case.work.micro_batch // ranks


def draw(case: Case, length: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return random tokens and labels of a micro batch, int64 (B, length) each, from the seed of `work`."""
    drawn = torch.randint(0, VOCABULARY, (case.work.micro_batch, length + 1), device=device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def torchtitan(case: Case, devices: int, *, fp8: bool = False) -> Step:
    """Step of torchtitan's trainer for its Llama 3 or Qwen3 MoE of this shape; fp8: torchao's tensorwise linears."""
    from torchtitan.config import JobConfig
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.moe import MoEArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    sizes = shape(case)
    common: dict[str, Any] = {
        "dim": sizes["hidden"],
        "n_layers": sizes["layers"],
        "n_heads": sizes["heads"],
        "n_kv_heads": sizes["groups"],
        "vocab_size": VOCABULARY,
        "max_seq_len": case.work.sequence,
        "rope_theta": 10000,
    }
    if "experts" in sizes:
        routing = {"score_func": "softmax", "route_norm": True, "score_before_experts": False}
        experts = MoEArgs(num_experts=8, num_shared_experts=0, top_k=sizes["top_k"], **routing)
        width = {"head_dim": sizes["hidden"] // sizes["heads"], "hidden_dim": sizes["ffn"], "qk_norm": False}
        more = {"moe_enabled": True, "moe_inter_dim": sizes["ffn"], "moe_args": experts}
        spec, arguments = qwen3.get_train_spec(), qwen3.qwen3_args["debugmodel"].__class__(**common, **width, **more)
    else:
        spec, arguments = llama3.get_train_spec(), llama3.TransformerModelArgs(**common)  # multiple_of gives 5632
    none: Any = None
    spec = dataclasses.replace(
        spec,
        model_args={"bench": arguments},
        build_dataloader_fn=none,
        build_tokenizer_fn=none,
        build_validator_fn=none,
    )
    register_train_spec("bench", spec)

    job = JobConfig()
    job.job.dump_folder = tempfile.gettempdir()
    job.model.name, job.model.flavor = "bench", "bench"
    job.training.local_batch_size = case.work.micro_batch
    job.training.global_batch_size = case.samples_per_step(devices)
    job.training.seq_len = case.work.sequence
    job.training.steps = 10**6
    job.training.dtype = "bfloat16" if fp8 or case.size("tensor", devices) > 1 else "float32"
    if fp8:
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.filter_fqns = ["output"]  # as in its own configurations: the head stays in bf16
    job.metrics.log_freq = 10**6
    job.optimizer.lr = 1e-4
    job.lr_scheduler.warmup_steps = 10
    job.compile.enable = True
    job.debug.moe_force_load_balance = "experts" in sizes
    job.activation_checkpoint.mode = "full" if "full" in str(case.work.overrides) else "none"
    job.parallelism.tensor_parallel_degree = case.size("tensor", devices)
    job.parallelism.context_parallel_degree = case.size("context", devices)
    job.parallelism.context_parallel_rotate_method = "alltoall" if case.exchange == "p2p" else "allgather"
    job.parallelism.expert_parallel_degree = case.size("expert", devices)
    trainer: Any = Trainer(job)

    def batches() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens, labels = draw(case, case.work.sequence, "cpu")  # where it counts the labels
            yield {"input": tokens}, labels

    feed = batches()

    def step() -> None:
        trainer.step += 1
        trainer.train_step(feed)

    trainer.step = 1  # its first step logs
    return step


def megatron(case: Case, devices: int) -> Step:
    """Step of Megatron-core's GPTModel, with the schedule, gradient buffers and optimizer of its training loop."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    sizes = shape(case)
    tensor, context, expert = (case.size(axis, devices) for axis in ("tensor", "context", "expert"))
    halves: list[int] | None = [devices // 2, 2] if case.exchange == "a2a+p2p" else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        hierarchical_context_parallel_sizes=halves,
        expert_model_parallel_size=expert,
    )
    model_parallel_cuda_manual_seed(1)
    values: dict[str, Any] = {
        "num_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "ffn_hidden_size": sizes["ffn"],
        "num_attention_heads": sizes["heads"],
        "num_query_groups": sizes["groups"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "context_parallel_size": context,
    }
    if context > 1:
        values |= {"cp_comm_type": case.exchange, "hierarchical_context_parallel_sizes": halves}
    if "full" in str(case.work.overrides):
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if "experts" in sizes:
        values |= {
            "num_moe_experts": sizes["experts"],
            "moe_router_topk": sizes["top_k"],
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_z_loss_coeff": 1e-3,
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_force_load_balancing": True,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": expert,
        }
    config = TransformerConfig(**values)
    spec = get_gpt_layer_with_transformer_engine_spec(sizes.get("experts"), moe_grouped_gemm="experts" in sizes)
    sequence = case.work.sequence
    module = GPTModel(config, spec, VOCABULARY, sequence, position_embedding_type="rope").cuda().bfloat16()
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=devices > 1,
        overlap_param_gather=devices > 1,
    )
    model = DistributedDataParallel(config, buffers, module)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=devices > 1,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    positions = torch.arange(sequence // context, device="cuda").expand(case.work.micro_batch, -1)

    def forward(feed: object, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        tokens, labels = draw(case, sequence // context)  # of this context-parallel rank
        losses = model(tokens, positions, None, labels=labels)
        return losses, lambda losses: (losses.float().mean(), {})

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward_no_pipelining(
            forward_step_func=forward,
            data_iterator=None,
            model=model,
            num_microbatches=micro_batches(case, devices),
            seq_length=sequence,
            micro_batch_size=case.work.micro_batch,
        )
        optimizer.step()

    return step


BUILDERS: dict[str, Callable[[Case, int], Step]] = {
    "torchtitan": torchtitan,
    "torchtitan_fp8": partial(torchtitan, fp8=True),
    "megatron": megatron,
}


def work(rank: int, name: str, case: Case, devices: int, port: int, file: str) -> None:
    """Run one rank; the first one writes the result to a file."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.cuda.set_device(rank)
    if name == "megatron":  # torchtitan's trainer does this itself
        dist.init_process_group("nccl")
    step, length = BUILDERS[name](case, devices), case.work.length
    torch.manual_seed(rank // case.size("tensor", devices))  # ranks that share a layer have the same tokens
    torch.cuda.reset_peak_memory_stats()
    for _ in range(length.warm_up):
        step()
    seconds: list[float] = []
    for _ in range(length.windows):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(length.window):
            step()
        torch.cuda.synchronize()
        dist.barrier()
        seconds.append((time.perf_counter() - start) / length.window)
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda", dtype=torch.float64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(file).write_text(json.dumps({"seconds": seconds, "peak_gib": peak.item()}))
    dist.barrier()
    dist.destroy_process_group()


def run_peer(name: str, case: Case, devices: int) -> Row:
    """Run a peer on the first GPUs of the host; return the seconds per step of each window and the peak memory."""
    with tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/row"
        spawn(work, (name, case, devices, get_free_port(), file), nprocs=devices)
        return json.loads(Path(file).read_text())
