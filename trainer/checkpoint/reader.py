"""Checkpoints: atomic `step-N` directories of safetensors and JSON files.

    step-1000/
        model.safetensors      parameters and expert biases, by name
        adapter.safetensors    for PEFT, instead of model.safetensors: the trainable parameters; `base` in state.json
                               identifies the base weights
        optimizer.safetensors  parameter name + .main (fp32 main weight) and optimizer state, as .exp_avg; absent from
                               converted models, which cannot be resumed
        scales.safetensors     scales and amaxes of delayed scaling in fp8, by linear layer
        ema.safetensors        exponential moving average of the weights, if enabled
        state.json             step, consumed samples, seed, data fingerprint, validation loss, versions
        config.json            the configuration document
        tokenizer.json         the tokenizer document
        manifest.json          size and SHA-256 of all other files

Each rank writes its own tensor file (`sharded_safetensors.py`); a checkpoint loads on any number of ranks.

A checkpoint is valid if every file has the size and hash recorded in the manifest. `writer.py` writes
checkpoints and applies retention.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from ...models.config.key_block import ConfigBlock
from ...models.moe.moe_layer import find_moe_layers
from ...models.parallel.partition import names_elsewhere
from ...models.peft.added_parameters import peft_parameter_names
from ...models.peft.apply import trainable_parameters
from ..device.bench_table import BenchTable
from ..optim.base_optimizer import Optimizer
from ..optim.loss_scale import LossScaleState
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.local_shard import LocalShard, local_shards
from ..utils.progress import Progress
from ..utils.safetensors_io import DamagedFileError, FileRecord, TensorSpec, read_json, verify_file
from .checkpoint_paths import RESOLVED_CONFIG, STEP_NAME, checkpoint_paths
from .hf_files import missing_model_hint
from .loop_state import LoopState
from .sharded_safetensors import FullTensors, OverlaidTensors, open_full_tensors, read_shards, shard_files

FORMAT = 1
WEIGHTS, ADAPTER, OPTIMIZER, EMA_WEIGHTS, FP8_SCALES = "model", "adapter", "optimizer", "ema", "scales"
"""Kinds of tensor files."""
STATE, CONFIG, TOKENIZER, MANIFEST = "state.json", "config.json", "tokenizer.json", "manifest.json"


class BaseRecord(ConfigBlock):
    """Identity of the base weights of an adapter."""

    path: Annotated[str, Field(min_length=1)]
    """Path at training time: a checkpoint or a Hugging Face model folder."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of the names and hashes of the weight files; see `pretrained.weights_digest`."""


class RunState(ConfigBlock):
    """Content of `state.json`: training progress, and the settings that must match for an exact resume."""

    step: int = Field(ge=0)
    """Completed optimizer steps."""
    updates: Annotated[int, Field(ge=0)] | None = None
    """Steps that were not skipped; None in checkpoints of versions that counted skipped steps too."""
    loss_scale: LossScaleState | None = None
    """Loss scale of the next step, in fp16."""
    consumed_samples: int = Field(ge=0)
    """Samples consumed so far; the position in the training data."""
    val_loss: float | None = None
    """Validation loss at this step, in nats per token; None if not measured."""
    metrics: dict[str, float] = Field(default={})
    """Other metrics of this step that `monitor` can rank checkpoints by."""
    loop: LoopState = LoopState.model_validate({})
    """State of the training loop and its callbacks."""
    seed: int
    """`model.seed`."""
    global_batch_size: int
    """Samples per step."""
    micro_batch_size: int
    """Samples per forward pass; it affects dropout masks."""
    sequence_length: int
    """Tokens per sample; encoder tokens for T5."""
    decoder_length: int = 0
    """Decoder tokens per sample for T5."""
    precision: str
    """Name of the precision plan."""
    optimizer: dict[str, str | int | float | None]
    """Optimizer and LR schedule settings."""
    data_fingerprint: str
    """Fingerprint of the training data; empty in a converted model, where it is unknown."""
    components: dict[str, str] = Field(default={})
    """Where the components of the user's own came from, by the key that names them."""
    data_keys: dict[str, bool | int | float | str | None] = Field(default={})
    """Keys of `model.data` that define how samples are built; empty in checkpoints of older versions."""
    base: BaseRecord | None = None
    """Base weights of an adapter; None for a whole model, or if the base was randomly initialized."""
    attention_times: BenchTable | None = None
    """Measured times that the attention backends were chosen by; None if they were not."""
    versions: dict[str, str]
    """Versions of stoker, torch and Python."""


class CheckpointMismatchError(UserError):
    """Checkpoint tensors do not match the model or optimizer; the lines list the differences."""


@contextmanager
def damage_as_user_error(checkpoint: Path) -> Iterator[None]:
    """Context in which damaged files of a checkpoint raise `UserError`."""
    try:
        yield
    except DamagedFileError as error:
        raise UserError(f"checkpoint {checkpoint} cannot be used: {error}") from None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory verified by `open_checkpoint`.

    Attributes:
        path: checkpoint directory.
        state: content of `state.json`.
        files: names of the files listed in the manifest.
        uses_ema: load the moving average of the weights instead of the weights, see `with_ema`.
    """

    path: Path
    state: RunState
    files: tuple[str, ...]
    uses_ema: bool = False

    @property
    def config_document(self) -> dict[str, Any]:
        """Configuration document of the run that wrote the checkpoint."""
        return _object(self.path / CONFIG)

    @property
    def tokenizer_document(self) -> dict[str, Any]:
        """Tokenizer document without the chat template: equal documents encode text identically."""
        return {name: value for name, value in self.tokenizer_document_with_chat.items() if name != "chat"}

    @property
    def tokenizer_document_with_chat(self) -> dict[str, Any]:
        """Tokenizer document, including the chat template."""
        return _object(self.path / TOKENIZER)

    def _tensor_files(self, kind: str) -> list[Path]:
        return [self.path / name for name in shard_files(kind, self.files)]

    @property
    def has_ema(self) -> bool:
        """True if the checkpoint holds a moving average of the weights."""
        return bool(self._tensor_files(EMA_WEIGHTS))

    @property
    def weight_files(self) -> list[Path]:
        """Model weight files, by rank."""
        return self._tensor_files(WEIGHTS)

    @property
    def adapter_files(self) -> list[Path]:
        """Adapter files, by rank."""
        return self._tensor_files(ADAPTER)

    @property
    def is_adapter(self) -> bool:
        """True if the checkpoint holds an adapter without its base weights."""
        return bool(self.adapter_files)

    def with_ema(self) -> Checkpoint:
        """Return this checkpoint with the weights replaced by their moving average; untrained weights are unchanged.

        Raises:
            UserError: the checkpoint has no moving average.
        """
        if not self.has_ema:
            raise UserError(
                f"--ema: checkpoint {self.path} holds no moving average of its weights; "
                "train with exp_manager.ema.enable=True to save one"
            )
        return replace(self, uses_ema=True)

    @contextmanager
    def open_weights(self) -> Iterator[FullTensors | OverlaidTensors]:
        """Open the weights (for PEFT, the adapter) to read unsharded tensors one at a time.

        Raises:
            DamagedFileError: not safetensors files, or an unsupported dtype.
        """
        with ExitStack() as stack:
            weights = stack.enter_context(
                open_full_tensors(self.adapter_files if self.is_adapter else self.weight_files)
            )
            if not self.uses_ema:
                yield weights
            else:
                yield OverlaidTensors(weights, stack.enter_context(open_full_tensors(self._tensor_files(EMA_WEIGHTS))))

    def load_weights(self, model: nn.Module, *, cast: bool = False) -> None:
        """Load the weights into a model of the same geometry, in place.

        Args:
            model: its `base_tensors` (for an adapter, `trainable_tensors`) tensors are filled; DTensors are supported.
            cast: convert dtypes that differ from the model's instead of raising.

        Raises:
            CheckpointMismatchError: the weights do not fit the model.
            UserError: they cannot be read.
        """
        tensors = trainable_tensors(model) if self.is_adapter else base_tensors(model)
        shards = local_shards(model, tensors)
        elsewhere = names_elsewhere(model)
        self._fill(ADAPTER if self.is_adapter else WEIGHTS, shards, elsewhere, cast=cast)
        if self.uses_ema:
            averaged = {name: shards[name] for name in self._averaged_names() if name in shards}
            self._fill(EMA_WEIGHTS, averaged, elsewhere, cast=cast)

    def load_optimizer(self, optimizer: Optimizer, elsewhere: Set[str] = frozenset()) -> None:
        """Load main weights and state into an optimizer of a model with the same parameters.

        Args:
            optimizer: the optimizer.
            elsewhere: names of the parameters that other ranks have (`names_elsewhere`).

        Raises:
            UserError: the tensors do not match the optimizer; lists the differences.
        """
        optimizer.load_shards(self._optimizer_specs, lambda shards: self._fill(OPTIMIZER, shards, elsewhere))
        optimizer.step_count = self.state.step if self.state.updates is None else self.state.updates
        if optimizer.loss_scale is not None and self.state.loss_scale is not None:
            optimizer.loss_scale.load(self.state.loss_scale)

    def _optimizer_specs(self) -> Mapping[str, TensorSpec]:
        with open_full_tensors(self._tensor_files(OPTIMIZER)) as saved:
            return dict(saved.specs)

    def load_ema(self, ema: Mapping[str, LocalShard], elsewhere: Set[str] = frozenset()) -> None:
        """Load the moving average of the weights; `elsewhere` as in `load_optimizer`.

        Raises:
            UserError: the tensors do not match; lists the differences.
        """
        self._fill(EMA_WEIGHTS, ema, elsewhere)

    def load_fp8_scales(self, scales: Mapping[str, LocalShard]) -> bool:
        """Load the state of delayed scaling; other pipeline stages have that of other layers.

        Returns:
            False if the checkpoint has none.

        Raises:
            UserError: the tensors do not match; lists the differences.
        """
        files = self._tensor_files(FP8_SCALES)
        if files:
            with open_full_tensors(files) as saved:
                elsewhere = saved.specs.keys() - scales.keys()
            self._fill(FP8_SCALES, scales, elsewhere)
        return bool(files)

    def _averaged_names(self) -> list[str]:
        with damage_as_user_error(self.path), open_full_tensors(self._tensor_files(EMA_WEIGHTS)) as average:
            return list(average.specs)

    def _fill(
        self, kind: str, destination: Mapping[str, LocalShard], elsewhere: Set[str] = frozenset(), *, cast: bool = False
    ) -> None:
        try:
            with damage_as_user_error(self.path), torch.no_grad():
                read_shards(self._tensor_files(kind), destination, cast=cast, elsewhere=elsewhere)
        except ValueError as error:
            raise CheckpointMismatchError(
                [
                    f"checkpoint {self.path} does not fit the model of this configuration:",
                    *(f"  {line}" for line in str(error).splitlines()),
                    f"use the geometry, precision and optimizer it was trained with: {self.path / CONFIG}",
                ]
            ) from None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint stores, by name: parameters and expert biases.

    An expert bias has no gradient (`expert_balance`), so it is a buffer and not a parameter of the optimizer.
    """
    return dict(model.named_parameters()) | _expert_biases(model)


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return `model_tensors` without the parameters that PEFT added."""
    added = set(peft_parameter_names(model))
    return {name: tensor for name, tensor in model_tensors(model).items() if name not in added}


def trainable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable part of `model_tensors`: trainable parameters and the expert biases that are updated."""
    return dict(trainable_parameters(model)) | _expert_biases(model, updated_only=True)


def _expert_biases(model: nn.Module, *, updated_only: bool = False) -> dict[str, Tensor]:
    return {
        f"{name}.expert_bias": layer.expert_bias
        for name, layer in find_moe_layers(model).items()
        if layer.expert_bias is not None and (layer.updates_expert_bias or not updated_only)
    }


def tensors_to_save(model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """Return (file kind, tensors by name) to save for a model; for PEFT only the trainable parameters."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return WEIGHTS, model_tensors(model)
    return ADAPTER, trainable_tensors(model)


def open_checkpoint(path: Path, *, with_optimizer: bool = True, verify: bool = True) -> Checkpoint:
    """Verify the files of a checkpoint directory and read its state.

    Args:
        path: a directory `step-N`.
        with_optimizer: require optimizer state and verify its files too, the largest ones; False if they are not read.
        verify: compare hashes; False if another rank has done so.

    Raises:
        DamagedFileError: a file is missing, modified or malformed.
    """
    if not path.is_dir():
        raise DamagedFileError(f"{path} is not a directory")
    records = read_manifest(path)
    if with_optimizer and not shard_files(OPTIMIZER, records):
        raise DamagedFileError("it holds a converted model without optimizer state; use model.restore_from_path")
    skipped = () if with_optimizer else shard_files(OPTIMIZER, records)
    checked = {name: record for name, record in records.items() if verify and name not in skipped}
    total = sum(record.size for record in checked.values())
    with Progress("verifying", total, "bytes") as progress, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # hashing releases the GIL
        checks = [pool.submit(verify_file, path / name, record, progress.advance) for name, record in checked.items()]
        for check in checks:
            check.result()
    try:
        state = RunState.model_validate(read_json(path / STATE))
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedFileError(f"{STATE}: `{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    if (named := STEP_NAME.fullmatch(path.name)) and int(named[1]) != state.step:
        raise DamagedFileError(f"it holds step {state.step}, not the step it is named after")
    return Checkpoint(path, state, tuple(records))


def newest_checkpoint(
    directory: Path, *, with_optimizer: bool = True, verify: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint in a directory, and one message for each damaged one that was skipped."""
    damaged: list[str] = []
    for path in reversed(checkpoint_paths(directory)):
        try:
            checkpoint = open_checkpoint(path, with_optimizer=with_optimizer, verify=verify)
        except DamagedFileError as error:
            damaged.append(f"{path} is damaged ({error})")
        else:
            return checkpoint, [f"{message}; using the one before it" for message in damaged]
    return None, damaged


def recorded_checkpoints(run_directory: Path) -> Path:
    """Return the directory to which the last start in a run directory saved its checkpoints."""
    try:
        keys = read_json(run_directory / RESOLVED_CONFIG)["exp_manager"]
        dirpath = keys.get("create_checkpoint_callback", True) and keys["checkpoint_callback_params"]["dirpath"]
    except (DamagedFileError, LookupError, TypeError, AttributeError):
        dirpath = None
    if not isinstance(dirpath, str) or not dirpath:
        return run_directory / "checkpoints"
    return user_path(dirpath, "exp_manager.checkpoint_callback_params.dirpath").absolute()


def find_checkpoint(path: Path, *, with_optimizer: bool = False, verify: bool = True) -> tuple[Checkpoint, list[str]]:
    """Find the checkpoint at a path: a `step-N` directory, a directory of them, or a run directory.

    Args:
        path: path given by the user.
        with_optimizer: as in `open_checkpoint`.
        verify: as in `open_checkpoint`.

    Returns:
        The checkpoint, and one message for each damaged one that was skipped.

    Raises:
        UserError: there is none, or the `step-N` directory given is damaged.
    """
    if STEP_NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        with damage_as_user_error(path):
            return open_checkpoint(path, with_optimizer=with_optimizer, verify=verify), []
    warnings: list[str] = []
    recorded = recorded_checkpoints(path)
    for directory in dict.fromkeys((path, recorded, path / "checkpoints")):
        checkpoint, found = newest_checkpoint(directory, with_optimizer=with_optimizer, verify=verify)
        warnings += found
        if checkpoint is not None:
            return checkpoint, warnings
    hint = "all are damaged" if warnings else missing_model_hint(path)
    if not warnings and recorded != path / "checkpoints":
        hint = f"this run saved its checkpoints to {recorded}, where none are now"
    raise UserError([f"no usable checkpoint in {path}: {hint}", *warnings])


def read_manifest(checkpoint: Path) -> dict[str, FileRecord]:
    """Return the manifest of a checkpoint directory: file name to size and hash.

    Raises:
        DamagedFileError: the manifest is malformed.
    """
    document = read_json(checkpoint / MANIFEST, byte_exact=True)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DamagedFileError(f"{MANIFEST} is not of format {FORMAT}")
    files = document.get("files")
    if not isinstance(files, dict):
        raise DamagedFileError(f"{MANIFEST} lists no files")
    tensors = [
        name for kind in (WEIGHTS, ADAPTER, OPTIMIZER, EMA_WEIGHTS, FP8_SCALES) for name in shard_files(kind, files)
    ]
    weight_kinds = [kind for kind in (WEIGHTS, ADAPTER) if shard_files(kind, files)]
    if set(files) != {*tensors, STATE, CONFIG, TOKENIZER} or len(weight_kinds) != 1:
        raise DamagedFileError(f"{MANIFEST} does not list the files of a checkpoint")
    records: dict[str, FileRecord] = {}
    for name, entry in files.items():
        match entry:
            case {"size": int(size), "sha256": str(sha256)}:
                records[name] = FileRecord(size, sha256)
            case _:
                raise DamagedFileError(f"{MANIFEST} has no size and hash of {name}")
    return records


def _object(path: Path) -> dict[str, Any]:
    with damage_as_user_error(path.parent):
        document = read_json(path)
        if not isinstance(document, dict):
            raise DamagedFileError(f"{path.name} is not a JSON object")
        return document
