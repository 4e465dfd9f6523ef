"""Functions of a resolved run, called with the keys it is resolved from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stoker.kernels.attention.flags import read_flags
from stoker.models.build import LanguageModel, ModelPlan, plan_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.dispatch.attention_calls import CallContext
from stoker.trainer.config.resolved_run import DataSpec, ResolvedRun, resolve_run
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core import training_state
from stoker.trainer.data import build_datasets
from stoker.trainer.data import evaluation_data as evaluation
from stoker.trainer.data.build_datasets import Data
from stoker.trainer.data.tokenizers.tokenizer import Tokenizer
from stoker.trainer.device import cuda_graph_support
from stoker.trainer.device.attention_software import assumed_software
from stoker.trainer.device.choose_device import compute_capability
from stoker.trainer.plan import memory_check, run_plan
from stoker.trainer.plan.hardware import GPUSpec
from stoker.trainer.plan.run_plan import Plan
from stoker.trainer.plan.target import Target

CPU = torch.device("cpu")


def data_spec(root: RootBlock) -> DataSpec:
    return resolve_run(root).data


def batch_spec(root: RootBlock) -> BatchSpec:
    return resolve_run(root).batch_spec


def build_data(root: RootBlock, tokenizer: Tokenizer | None = None) -> Data:
    return build_datasets.build_data(data_spec(root), tokenizer)


def evaluation_data(path: Path, root: RootBlock, tokenizer: Tokenizer) -> Any:
    return evaluation.evaluation_data(path, data_spec(root), tokenizer)


def build_model(root: RootBlock, data: Data, device: torch.device = CPU) -> LanguageModel:
    return training_state.build_model(resolved_on(root, device), data.vocab_size, device)


def resolved_on(root: RootBlock, device: torch.device, world_size: int = 1) -> ResolvedRun:
    return resolve_run(root, world_size=world_size, capability=compute_capability(device))


def gpu_target(root: RootBlock, gpu: GPUSpec) -> Target:
    return run_plan.gpu_target(resolve_run(root), gpu)


def make_plan(root: RootBlock, target: Target, *, vocab_size: int | None = None, world_size: int = 1) -> Plan:
    run = resolve_run(root, world_size=world_size, capability=target.capability)
    return run_plan.make_plan(run, target, vocab_size=vocab_size)


def choose_attention(run: ResolvedRun, device: torch.device) -> ModelPlan:
    """Choose the attention backends for a CPU, or for an H100 that need not be present."""
    flags = read_flags()
    context: CallContext = {
        "device": device.type,
        "capability": (9, 0) if device.type == "cuda" else None,
        "dtype": run.precision.compute,
        "batch": run.model.micro_batch_size,
        "deterministic": not flags.allow_nondeterministic,
    }
    software = assumed_software(run.model, device.type)
    return plan_model(run.family, run.batch_spec, context, flags=flags, software=software, peft=run.peft)


def check_memory(root: RootBlock, device: torch.device, world_size: int = 1) -> None:
    run = resolve_run(root, world_size=world_size, capability=(9, 0) if device.type == "cuda" else None)
    memory_check.check_memory(run, device, choose_attention(run, device))


def uses_cuda_graph(root: RootBlock, device: torch.device, world_size: int = 1) -> bool:
    return cuda_graph_support.uses_cuda_graph(resolve_run(root, world_size=world_size), device)


def cuda_graph_unsupported_reason(root: RootBlock, device: torch.device) -> str | None:
    return cuda_graph_support.cuda_graph_unsupported_reason(resolve_run(root), device)
