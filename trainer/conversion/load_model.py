"""A trained model, ready to be asked: what generation and evaluation start from.

It comes out of a checkpoint, or out of a folder of Hugging Face's as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.attention.flags import read_flags
from ...models.build import LanguageModel, build_model
from ...models.config.family_rules import stacks_of_keys
from ...models.config.parameter_count import count_parameters
from ...models.config.peft_slice import peft_slice
from ...models.config.t5 import T5Keys
from ..checkpoint.reader import RunState, find_checkpoint
from ..config.batch_spec import sample_form
from ..config.data_task import task_name
from ..config.run_config import RunConfig
from ..data.build_datasets import sequence_length
from ..data.tokenizers.bos import text_start
from ..data.tokenizers.tokenizer import Tokenizer, from_document
from ..device.precision import PrecisionPlan, plan_precision
from ..plan.memory_check import host_memory
from ..utils.environment import let_segments_grow
from ..utils.errors import UserError
from .adapter_weights import base_of_adapter, load_with_base
from .from_hf import check, open_source, run_of, state_of
from .from_peft import is_peft_folder
from .pretrained import BaseWeights, is_foreign
from .size_check import check_claimed_size


@dataclass(frozen=True)
class Restored:
    """A model in evaluation mode and what it was trained with.

    Attributes:
        path: the checkpoint `step-N`, or the folder, it came from.
        state: where the run stood; of a folder of Hugging Face's that of a run that has not begun.
        config: the configuration of that run.
        tokenizer: the one it was trained with.
        model: on `device`, without dropout.
        device: where the model is.
        precision: dtypes of weights and arithmetic.
    """

    path: Path
    state: RunState
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
        documents = self.state.consumed_samples > 0 and task_name(self.config.root.model) == "gpt"
        if documents and self.tokenizer.eos_id is not None:
            return [self.tokenizer.eos_id]
        return text_start(self.tokenizer)


def restore(path: Path, device_name: str = "auto", base: Path | None = None, *, average: bool = False) -> Restored:
    """Load a model.

    Args:
        path: a run directory, its checkpoints directory or one step in it; of several the newest valid one is taken,
            and damaged ones are named on standard error. Or a folder of Hugging Face's.
        device_name: `auto` (a CUDA GPU where there is one, else the CPU), `cpu`, `cuda` or `mps`.
        base: where the frozen weights of an adapter are now; None: where they were when it was trained.
        average: take the moving average of the weights that were trained.

    Raises:
        UserError: no usable model, or no such device; or an adapter whose frozen weights are not there.
    """
    device = choose_device(device_name)
    if is_foreign(path) and not is_peft_folder(path):
        found = _in_folder(path, base, average=average)
    else:
        found = _in_checkpoint(path, base, average=average)
    config, tokenizer = found.config, found.tokenizer
    keys = config.root.model
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
    need, there = count_parameters(keys, vocab_size, form) * precision.weights.itemsize, host_memory()
    if there is not None and need > there:
        raise UserError(
            f"{found.name} cannot run here: the weights of its configuration need "
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
        raise UserError([f"{found.name} cannot run here:", *str(error).splitlines()]) from None
    found.load(model)
    return Restored(found.path, found.state, config, tokenizer, model.eval(), device, precision)


class _Found(NamedTuple):
    """A model that nothing has been built of.

    Attributes:
        name: for messages.
        path: where it is.
        state: where the run stood.
        config: the configuration of that run.
        tokenizer: the one it was trained with.
        load: copies the weights into the model.
    """

    name: str
    path: Path
    state: RunState
    config: RunConfig
    tokenizer: Tokenizer
    load: Callable[[nn.Module], None]


def _in_checkpoint(path: Path, base: Path | None, *, average: bool) -> _Found:
    """The model of a checkpoint; arguments as in `restore`."""
    checkpoint, complaints = find_checkpoint(path)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    checkpoint = checkpoint.averaged() if average else checkpoint
    name = f"checkpoint {checkpoint.path}"
    config = RunConfig.from_document(
        checkpoint.config_document, trusted=False, origin=str(checkpoint.path / "config.json")
    )
    try:
        tokenizer = from_document(checkpoint.saved_tokenizer)
    except ValueError as error:
        raise UserError(f"{name} cannot be used: tokenizer.json: {error}") from None
    frozen = base_of_adapter(checkpoint, base)
    if frozen is not None or not checkpoint.is_adapter:
        check_claimed_size(checkpoint, config.root, tokenizer.vocab_size, frozen)
    load = partial(load_with_base, checkpoint, base=frozen, cast=True)
    return _Found(name, checkpoint.path, checkpoint.state, config, tokenizer, load)


def _in_folder(path: Path, base: Path | None, *, average: bool) -> _Found:
    """The model of a folder of Hugging Face's; arguments as in `restore`."""
    if average:
        raise UserError(f"--ema: {path} is a model of Hugging Face's, which holds no moving average")
    if base is not None:
        raise UserError(f"--base {base}: {path} holds a whole model; leave --base out")
    try:
        with open_source(path) as source:
            config, tokenizer = run_of(source, check(source, None, ()))
    except UserError as error:
        cure = f"`stoker convert {path} FOLDER` takes --tokenizer and --ignore-field, and makes a checkpoint of it"
        raise UserError([*error.lines, cure]) from None
    load = BaseWeights(path, None).load
    return _Found(str(path), path, state_of(config.root), config, tokenizer, load)


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
    if name == "cuda":
        let_segments_grow()
    return torch.device(name)
