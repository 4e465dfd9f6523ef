"""Load a trained model for generation and evaluation, from a stoker checkpoint or a Hugging Face folder."""

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
from ...models.build import TORCH_DTYPES, LanguageModel, build_model
from ...models.config.families import keys_by_stack
from ...models.config.t5 import T5Keys
from ...models.model_cost import count_parameters
from ...models.parallel.layout import ONE_RANK
from ...models.parallel.relay import Relay
from ..checkpoint.hf_files import is_hf_folder, is_peft_folder
from ..checkpoint.reader import RunState, find_checkpoint
from ..config.resolved_run import ResolvedRun
from ..config.run_config import RunConfig
from ..config.run_precision import RunPrecision, resolve_precision
from ..data.tokenizers.tokenizer import Tokenizer
from ..device.choose_device import compute_capability, device_from_option
from ..distributed.mesh import Mesh
from ..utils.errors import UserError
from ..utils.host_memory import host_memory
from .adapter_weights import find_base_of_adapter, load_with_base
from .checkpoint_io import checkpoint_config, checkpoint_tokenizer, initial_state
from .from_hf import map_source, open_source
from .pretrained import PretrainedWeights, check_model_size


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model in evaluation mode, with its configuration and tokenizer.

    Attributes:
        path: the checkpoint `step-N` or the Hugging Face folder.
        state: training state of the checkpoint; for a Hugging Face folder that of a run at step 0.
        precision: dtypes of weights and arithmetic.
    """

    path: Path
    state: RunState
    config: RunConfig
    tokenizer: Tokenizer
    model: LanguageModel
    device: torch.device
    precision: RunPrecision

    @property
    def run(self) -> ResolvedRun:
        """The configuration of its run, resolved."""
        return self.config.resolved

    @property
    def context_length(self) -> int:
        """Context length of the model in tokens."""
        return self.run.data.task.length

    @property
    def prompt_prefix(self) -> list[int]:
        """Tokens to put before a prompt.

        A GPT trained here on concatenated documents has seen each document after the EOS token of the previous one, so
        it gets that token; for other models the tokenizer determines it (BOS).
        """
        documents = self.state.consumed_samples > 0 and self.run.data.task.name == "gpt"
        if documents and self.tokenizer.eos_id is not None:
            return [self.tokenizer.eos_id]
        return self.tokenizer.document_start_ids()


def load_model(
    path: Path,
    device_name: str = "auto",
    base: Path | None = None,
    *,
    ema: bool = False,
    ranks: Mesh | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        path: a run directory, its checkpoints directory or a step in it; of several checkpoints the newest valid one is
            loaded, and damaged ones are reported on standard error. Or a Hugging Face folder.
        device_name: `auto` (a CUDA GPU if there is one, else the CPU), `cpu`, `cuda` or `mps`.
        base: current path of the base weights of an adapter; None for the path recorded in the checkpoint.
        ema: load the EMA of the trained weights.
        ranks: ranks that share the model, of which this process loads one's part; None for one process.

    Raises:
        UserError: there is no usable model or no such device, it has fewer layers than stages, or the base weights of
            an adapter are missing.
    """
    device = device_from_option(device_name)
    if is_hf_folder(path) and not is_peft_folder(path):
        saved = _open_hf_folder(path, base, average=ema)
    else:
        saved = _open_checkpoint(path, base, average=ema)
    config, tokenizer = saved.config, saved.tokenizer
    run, keys = config.resolved, config.resolved.model
    if device.type == "cuda":
        precision = resolve_precision(run.trainer.precision, keys.megatron_amp_O2, compute_capability(device))
    else:
        precision = RunPrecision("fp32", "fp32")
        # Backend keys of a GPU run do not apply to this device; environment variables still do.
        defaults = {"attention_backend": "auto", "use_flash_attention": None, "transformer_engine": None}
        for at, stack in keys_by_stack(keys).items():
            for name, default in defaults.items():
                if (value := getattr(stack, name)) != default:
                    note = f"note: `model.{at}{name}` ({value}) of the run is not applied on {device.type}"
                    print(note, file=sys.stderr)
        if isinstance(keys, T5Keys):
            stacks = {"encoder": keys.encoder, "decoder": keys.decoder}
            keys = keys.model_copy(update={name: stack.model_copy(update=defaults) for name, stack in stacks.items()})
        else:
            keys = keys.model_copy(update=defaults)
    layout, layers = ONE_RANK if ranks is None else ranks.layout, min(stack.num_layers for stack in run.family.stacks)
    if layout.pipeline > layers:
        raise UserError(
            f"--pipeline-parallel {layout.pipeline} must be at most {layers}, the layers of a stack of {saved.name}"
        )
    vocab_size = keys.override_vocab_size or tokenizer.vocab_size
    needed, available = (
        count_parameters(keys, vocab_size, run.batch_spec) * precision.weights_itemsize // layout.model_ranks,
        host_memory(),
    )
    if available is not None and needed > available:
        raise UserError(
            f"{saved.name} cannot run here: the weights of its configuration need {needed / 2**30:,.1f} GiB, but there "
            f"are {available / 2**30:,.1f} GiB"
        )
    try:
        model = build_model(
            keys.model_copy(update={"compile": False}),  # compiling would take longer than most generations
            vocab_size=vocab_size,
            device=device,
            dtype=TORCH_DTYPES[precision.weights],
            flags=read_flags(),
            micro_batch_size=1,
            batch_spec=run.batch_spec,
            compute_dtype=TORCH_DTYPES[precision.compute],
            kinds=("evaluation", "generation"),
            peft=run.peft,
            tensor_parallel=None if ranks is None else ranks.tensor,
            relay=None
            if ranks is None or layout.pipeline == 1
            else Relay(ranks.stages.rank, layout.pipeline, ranks.stages.group),
        )
    except ValueError as error:
        raise UserError([f"{saved.name} cannot run here:", *str(error).splitlines()]) from None
    saved.load(model)
    return LoadedModel(saved.path, saved.state, config, tokenizer, model.eval(), device, precision)


class _SavedModel(NamedTuple):
    """Description of a saved model, before it is built."""

    name: str
    path: Path
    state: RunState
    config: RunConfig
    tokenizer: Tokenizer
    load: Callable[[nn.Module], None]


def _open_checkpoint(path: Path, base: Path | None, *, average: bool) -> _SavedModel:
    """Open a stoker checkpoint; arguments as in `load_model`."""
    checkpoint, complaints = find_checkpoint(path)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    checkpoint = checkpoint.with_ema() if average else checkpoint
    name = f"checkpoint {checkpoint.path}"
    config, tokenizer = checkpoint_config(checkpoint), checkpoint_tokenizer(checkpoint)
    base_weights = find_base_of_adapter(checkpoint, base)
    if base_weights is not None or not checkpoint.is_adapter:
        check_model_size(checkpoint, config.resolved, tokenizer.vocab_size, base_weights)
    load = partial(load_with_base, checkpoint, base=base_weights, cast=True)
    return _SavedModel(name, checkpoint.path, checkpoint.state, config, tokenizer, load)


def _open_hf_folder(path: Path, base: Path | None, *, average: bool) -> _SavedModel:
    """Open a Hugging Face folder; arguments as in `load_model`."""
    if average:
        raise UserError(f"--ema: {path} is a Hugging Face model, which has no EMA weights")
    if base is not None:
        raise UserError(f"--base {base}: {path} holds a whole model; leave --base out")
    try:
        with open_source(path) as source:
            incoming = map_source(source, None, ())
    except UserError as error:
        fix = f"`stoker convert {path} FOLDER` takes --tokenizer and --ignore-field, and writes a stoker checkpoint"
        raise UserError([*error.lines, fix]) from None
    load = PretrainedWeights(path, None).load
    state = initial_state(incoming.config.resolved)
    return _SavedModel(str(path), path, state, incoming.config, incoming.tokenizer, load)
