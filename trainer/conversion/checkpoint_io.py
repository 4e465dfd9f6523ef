"""Read the configuration and tokenizer of a checkpoint to convert; write a converted checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.config.families import sequence_length_of
from ...models.config.t5 import T5Keys
from ..checkpoint.reader import CONFIG, Checkpoint, RunState
from ..checkpoint.run_environment import main_versions
from ..checkpoint.sharded_safetensors import shard_file_name
from ..checkpoint.writer import write_metadata
from ..config.load import config_from_document
from ..config.resolved_run import ResolvedRun
from ..config.run_config import RunConfig
from ..data.tokenizers.tokenizer import Tokenizer
from ..data.tokenizers.tokenizer_document import tokenizer_from_dict
from ..utils.errors import UserError
from ..utils.progress import Progress
from ..utils.safetensors_io import write_safetensors_stream
from .tensor_source import TensorSource


def checkpoint_config(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint.

    Raises:
        UserError: this version does not support it.
    """
    origin = str(checkpoint.path / CONFIG)
    return config_from_document(checkpoint.config_document, trusted=False, origin=origin)


def checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a checkpoint, with its chat template.

    Raises:
        UserError: its document is malformed.
    """
    try:
        return tokenizer_from_dict(checkpoint.tokenizer_document_with_chat)
    except ValueError as error:
        raise UserError(f"checkpoint {checkpoint.path} cannot be used: tokenizer.json: {error}") from None


def initial_state(run: ResolvedRun) -> RunState:
    """Return the state of a converted checkpoint, at step 0."""
    form = run.batch_spec
    return RunState(
        step=0,
        consumed_samples=0,
        seed=run.model.seed,
        global_batch_size=run.model.global_batch_size,
        micro_batch_size=run.model.micro_batch_size,
        sequence_length=sequence_length_of(run.model),
        decoder_length=form.decoder_seq_length if isinstance(run.model, T5Keys) else 0,
        precision="as converted",
        optimizer={},
        data_fingerprint="",
        versions=main_versions(),
    )


def write_converted_checkpoint(
    folder: Path,
    kind: str,
    tensors: TensorSource,
    state: RunState,
    config_document: Mapping[str, Any],
    tokenizer_document: Mapping[str, Any],
) -> None:
    """Write `checkpoints/step-0` in a new folder, without optimizer state.

    Args:
        folder: temporary folder of `atomic_folder`.
        kind: `WEIGHTS` or `ADAPTER`.
    """
    step = folder / "checkpoints" / "step-0"
    step.mkdir(parents=True)
    name = shard_file_name(kind, 0, 1)
    with Progress("writing", sum(spec.num_bytes for spec in tensors.specs.values()), "bytes") as progress:
        record = write_safetensors_stream(step / name, tensors.specs, tensors.read, on_write=progress.advance)
    write_metadata(step, {name: record}, state, config_document, tokenizer_document)
