"""A trained model out of a checkpoint, ready to be asked: what generation and evaluation start from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.attention.flags import read_flags
from ..models.build import LanguageModel, build_model
from ..models.config.counting import count_parameters
from ..models.config.family_rules import stacks_of_keys
from ..models.config.peft_slice import peft_slice
from ..models.config.t5 import T5Keys
from .checkpoint import Checkpoint, find_checkpoint
from .claimed_size import check_claimed_size
from .config.run_config import RunConfig
from .data.build import sequence_length
from .data.task import task_name
from .data.text_start import text_start
from .data.tokenizers import Tokenizer, from_document
from .errors import UserError
from .memory import host_memory
from .peft_weights import base_of_adapter, load_with_base
from .precision import PrecisionPlan, plan_precision
from .sample_form import sample_form


@dataclass(frozen=True)
class Restored:
    """A model in evaluation mode and what it was trained with.

    Attributes:
        checkpoint: where it came from.
        config: the configuration of that run.
        tokenizer: the one it was trained with.
        model: on `device`, without dropout.
        device: where the model is.
        precision: dtypes of weights and arithmetic.
    """

    checkpoint: Checkpoint
    config: RunConfig
    tokenizer: Tokenizer
    model: LanguageModel
    device: torch.device
    precision: PrecisionPlan

    @property
    def context(self) -> int:
        """Most tokens the model was trained to attend to."""
        return sequence_length(self.config.root)

    @property
    def text_start(self) -> list[int]:
        """The tokens before a text that the model goes on with.

        A run that was trained on a stream of documents has seen each after the eos of the one before; of any other
        model its tokenizer knows what a text begins with.
        """
        documents = self.checkpoint.state.consumed_samples > 0 and task_name(self.config.root.model) == "gpt"
        if documents and self.tokenizer.eos_id is not None:
            return [self.tokenizer.eos_id]
        return text_start(self.tokenizer)


def restore(path: Path, device_name: str = "auto", base: Path | None = None, *, average: bool = False) -> Restored:
    """Load the model of a checkpoint.

    Args:
        path: a run directory, its checkpoints directory or one step in it; of several the newest valid one is taken,
            and damaged ones are named on standard error.
        device_name: `auto` (a CUDA GPU where there is one, else the CPU), `cpu`, `cuda` or `mps`.
        base: where the frozen weights of an adapter are now; None: where they were when it was trained.
        average: take the moving average of the weights that were trained.

    Raises:
        UserError: no usable checkpoint, or no such device; or an adapter whose frozen weights are not there.
    """
    device = choose_device(device_name)
    checkpoint, complaints = find_checkpoint(path)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    checkpoint = checkpoint.averaged() if average else checkpoint
    config = RunConfig.from_document(
        checkpoint.config_document, trusted=False, origin=str(checkpoint.path / "config.json")
    )
    keys = config.root.model
    try:
        tokenizer = from_document(checkpoint.saved_tokenizer)
    except ValueError as error:
        raise UserError(f"checkpoint {checkpoint.path} cannot be used: tokenizer.json: {error}") from None
    if device.type == "cuda":
        precision = plan_precision(config.root.trainer, keys.megatron_amp_O2, device)
    else:
        precision = PrecisionPlan("fp32", torch.float32)
        # What was wished for a GPU says nothing about this device; the environment's flags still hold.
        anything = {"attention_backend": "auto", "use_flash_attention": None, "transformer_engine": None}
        for at, stack in stacks_of_keys(keys).items():
            for name, neutral in anything.items():
                if (wish := getattr(stack, name)) != neutral:
                    told = f"note: `model.{at}{name}` ({wish}) of the run is not applied on {device.type}"
                    print(told, file=sys.stderr)
        if isinstance(keys, T5Keys):
            stacks = {"encoder": keys.encoder, "decoder": keys.decoder}
            keys = keys.model_copy(update={name: stack.model_copy(update=anything) for name, stack in stacks.items()})
        else:
            keys = keys.model_copy(update=anything)
    vocab_size = keys.override_vocab_size or tokenizer.vocab_size
    form = sample_form(config.root)
    frozen = base_of_adapter(checkpoint, base)
    if frozen is not None or not checkpoint.is_adapter:
        check_claimed_size(checkpoint, config.root, tokenizer.vocab_size, frozen)
    need, there = count_parameters(keys, vocab_size, form) * precision.weights.itemsize, host_memory()
    if there is not None and need > there:
        raise UserError(
            f"checkpoint {checkpoint.path} cannot run here: the weights of its configuration need "
            f"{need / 2**30:,.1f} GiB, of {there / 2**30:,.1f} GiB there are"
        )
    try:
        model = build_model(
            keys.model_copy(update={"compile": False}),  # would take longer than most answers
            vocab_size=vocab_size,
            device=device,
            dtype=precision.weights,
            flags=read_flags(),
            micro_batch_size=1,
            form=form,
            compute_dtype=precision.autocast,
            kinds=("evaluation", "generation"),
            peft=peft_slice(keys.peft),
        )
    except ValueError as error:
        raise UserError([f"checkpoint {checkpoint.path} cannot run here:", *str(error).splitlines()]) from None
    load_with_base(checkpoint, model, frozen, cast=True)
    return Restored(checkpoint, config, tokenizer, model.eval(), device, precision)


def choose_device(name: str) -> torch.device:
    """The device a user names.

    Raises:
        UserError: this machine, or this build of torch, does not have it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[name]:
        raise UserError(f"--device {name}: torch {torch.__version__} finds no such device here; use --device cpu")
    return torch.device(name)
