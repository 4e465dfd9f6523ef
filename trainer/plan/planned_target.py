"""Target of a plan: a GPU, which need not be here, and the vocabulary of the tokenizer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ..config.resolved_run import DataSpec, ResolvedRun, resolve_run
from ..config.schema.root import RootBlock
from ..data.tokenizers.vocabulary import configured_tokenizer
from ..device.choose_device import compute_capability
from ..distributed.placement import num_local_devices
from ..utils.errors import UserError
from .hardware import DEFAULT_GPU, parse_gpu
from .run_plan import gpu_target, local_target
from .target import Target


def planned_target(
    root: RootBlock, device: str | None = None, network: float | None = None
) -> tuple[ResolvedRun, Target]:
    """Return the run on a GPU, and that GPU.

    Args:
        root: the configuration.
        device: the GPU, as of `stoker plan --device`; None: this machine's, or the default one.
        network: GB/s of each GPU to other machines; None: as measured, or that of hardware.yaml.

    Raises:
        UserError: there is no such GPU in hardware.yaml.
    """
    trainer = root.trainer
    processes = num_local_devices(trainer) * trainer.num_nodes
    if device is None and torch.cuda.is_available() and trainer.accelerator in ("auto", "gpu", "cuda"):
        local = torch.device("cuda", 0)
        run = resolve_run(root, world_size=processes, capability=compute_capability(local))
        target = local_target(run, local)
    else:
        try:
            gpu = parse_gpu(DEFAULT_GPU if device is None else device)
        except ValueError as error:
            raise UserError(str(error)) from None
        run = resolve_run(root, world_size=processes, capability=gpu.capability)
        target = gpu_target(run, gpu)
    if network is not None and target.gpu is not None:
        target = replace(target, gpu=replace(target.gpu, network=network * 1e9))
    return run, target


def known_vocabulary(spec: DataSpec) -> tuple[int | None, str]:
    """Return the vocabulary size and an empty note; None and a note if it is only known from the data."""
    if spec.vocab_size is not None:
        return spec.vocab_size, ""
    with suppress(UserError):
        return configured_tokenizer(spec).vocab_size, ""
    return None, (
        "the vocabulary size depends on the data, so embedding and head are left out; "
        "set model.override_vocab_size to include them"
    )
