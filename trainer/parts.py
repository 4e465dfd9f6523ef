"""The parts of a run, each made from the configuration: device, model, optimizer, validation, checkpoints, rates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ..kernels.attention.flags import read_flags
from ..models.build import build_gpt, parameter_count, plan_gpt
from ..models.config.slices import gpt_slice
from ..models.gpt import GPT
from .checkpoint import RunState, write_checkpoint
from .config.run_config import RunConfig
from .config.schema import RootBlock
from .data.build import Data, sequence_length
from .data.samples import Samples
from .errors import UserError
from .evaluation import EvaluationResult, evaluate, summed_loss
from .flops import bf16_peak, training_flops_per_token
from .loop import Rates, Save, Validate
from .memory import check_memory
from .module import LanguageModule
from .optim import AdamW
from .precision import PrecisionPlan
from .run_directory import RunDirectory, device_name


def choose_device(root: RootBlock) -> torch.device:
    """The device of `trainer.accelerator`; `auto` takes a CUDA GPU where there is one, else the CPU.

    Raises:
        UserError: it is not there, or more than one is asked for.
    """
    keys = root.trainer
    if keys.num_nodes != 1 or keys.devices not in (1, "auto"):
        raise UserError(
            f"`trainer.devices` ({keys.devices}) on `trainer.num_nodes` ({keys.num_nodes}): training runs "
            "on one device; use 1 and 1"
        )
    kind = {"gpu": "cuda", "auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(
        keys.accelerator, keys.accelerator
    )
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[kind]:
        raise UserError(
            f"`trainer.accelerator` ({keys.accelerator}): torch {torch.__version__} finds no such device here; "
            "use trainer.accelerator=cpu or auto"
        )
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def check_attention(root: RootBlock, precision: PrecisionPlan, device: torch.device) -> None:
    """Find out whether the model can be had here, before anything is built or written.

    Raises:
        UserError: no attention backend may run, or `model.compile` cannot be had.
    """
    keys = root.model
    try:
        plan_gpt(
            gpt_slice(keys, vocab_size=1),
            device=device,
            dtype=precision.autocast or precision.weights,
            flags=read_flags(),
            micro_batch_size=keys.micro_batch_size,
            seq_length=sequence_length(root),
        )
    except ValueError as error:
        raise UserError(str(error).splitlines()) from None


def build_model(root: RootBlock, data: Data, precision: PrecisionPlan, device: torch.device) -> GPT:
    """The model with its initial weights.

    Raises:
        UserError: it cannot fit, no attention backend may run, or `model.compile` cannot be had.
    """
    check_memory(root, precision, device)
    try:
        return build_gpt(
            root.model,
            vocab_size=data.vocab_size,
            device=device,
            dtype=precision.weights,
            flags=read_flags(),
            micro_batch_size=root.model.micro_batch_size,
            seq_length=sequence_length(root),
            compute_dtype=precision.autocast,
        )
    except ValueError as error:
        raise UserError(str(error).splitlines()) from None


def build_optimizer(root: RootBlock, model: GPT, precision: PrecisionPlan) -> AdamW:
    """AdamW over all parameters of the model."""
    optim = root.model.optim
    return AdamW(
        model.named_parameters(),
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        norms_decay=root.model.do_layer_norm_weight_decay,
        main_weights=precision.main_weights,
        clip_norm=root.trainer.gradient_clip_val,
    )


def build_rates(root: RootBlock, model: GPT, device: torch.device) -> Rates:
    """What turns the time of a step into tokens per second and MFU."""
    length = sequence_length(root)
    return Rates(
        tokens_per_step=root.model.global_batch_size * length,
        flops_per_token=training_flops_per_token(root.model, model.output_weight.shape[0], length),
        peak_flops=bf16_peak(device_name(device)),
    )


def build_validation(
    root: RootBlock, model: GPT, data: Data, precision: PrecisionPlan, device: torch.device
) -> Validate | None:
    """A function that validates on the samples `trainer.limit_val_batches` asks for, or None for 0."""
    limit, samples = root.trainer.limit_val_batches, data.validation
    if not limit or samples is None:
        return None
    size = root.model.micro_batch_size

    def validate(global_batches: int | None) -> EvaluationResult:
        model.eval()
        try:
            return evaluate(
                summed_loss(model, precision, device),
                samples,
                token_bytes=data.token_bytes,
                batch_size=size,
                limit_batches=_micro_batches(root, samples, limit if global_batches is None else global_batches),
                device=device,
            )
        finally:
            model.train()

    return validate


def _micro_batches(root: RootBlock, samples: Samples, limit: int | float) -> int:
    """Micro batches of a validation; an int limit counts global batches, a float is a part of all samples."""
    size = root.model.micro_batch_size
    if isinstance(limit, int):
        return limit * (root.model.global_batch_size // size)
    return max(1, round(limit * samples.samples / size))


def build_save(
    config: RunConfig, directory: RunDirectory, data: Data, start: RunState, module: LanguageModule
) -> Save | None:
    """A function that writes a checkpoint of a step, or None where none would be kept."""
    keys = config.root.exp_manager
    params = keys.checkpoint_callback_params
    if not keys.create_checkpoint_callback or (params.save_top_k == 0 and not params.save_last):
        return None

    def save(step: int, val_loss: float | None) -> Path:
        state = start.model_copy(
            update={"step": step, "consumed_samples": consumed_samples(start, step), "val_loss": val_loss}
        )
        return write_checkpoint(
            directory.checkpoints,
            state,
            weights=dict(module.model.named_parameters()),
            optimizer=module.adamw.tensors(),
            config_document=config.document,
            tokenizer_document=data.tokenizer.to_document(),
        )

    return save


def consumed_samples(start: RunState, step: int) -> int:
    """Samples trained on after `step` steps, of a run (part) that began at `start`."""
    return start.consumed_samples + (step - start.step) * start.global_batch_size


def describe(root: RootBlock, model: GPT, data: Data, precision: PrecisionPlan, device: torch.device) -> Iterator[str]:
    """What is about to be trained, on what and how, one line each."""
    keys = root.model
    micro_batches = keys.global_batch_size // keys.micro_batch_size
    yield f"device {device_name(device)}, {precision.name}"
    yield f"data {data.description}"
    yield f"model {parameter_count(model):,} parameters, {keys.num_layers} layers, hidden size {keys.hidden_size}"
    attention = ", ".join(f"{kind} {decision.backend}" for kind, decision in model.attention_decisions.items())
    yield f"attention {attention} (reasons in run.log)"
    yield f"layers {'compiled' if model.compiled else 'not compiled'}: {model.compile_reason}"
    yield (
        f"{root.trainer.max_steps:,} steps of {keys.global_batch_size} samples in {micro_batches} micro "
        f"batch{'es' * (micro_batches != 1)}, {keys.global_batch_size * sequence_length(root):,} tokens each"
    )
    if root.trainer.enable_model_summary:
        for name, part in model.named_children():
            yield f"  {name:<24} {type(part).__name__:<20} {parameter_count(part):>15,}"
