"""Checkpoints: a directory `step-N` of safetensors and JSON that is there completely or not at all.

    step-1000/
        model.safetensors      the parameters and the biases of experts, by name
        adapter.safetensors    instead, where the model is frozen: the parameters that are trained; `base` in
                               state.json says which weights they belong to
        optimizer.safetensors  parameter name + .main (fp32 main weight) and the optimizer's own, as .exp_avg; a
                               converted model has none, and no run goes on from it
        ema.safetensors        the moving average of the weights, where there is one
        state.json             step, consumed samples, seed, data fingerprint, validation loss, versions
        config.json            the configuration document
        tokenizer.json         the tokenizer document
        manifest.json          size and SHA-256 of every other file

Several ranks write a file each (`tensor_files`); they load on any other number of ranks.

Reading starts at the manifest: a checkpoint is valid when every file has the recorded size and hash.
`checkpoint_writing.py` writes them and deletes those that are not kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from ...models.config.key_block import Block
from ...models.moe.find_moe_layers import moe_layers
from ...models.peft.added_parameters import added_parameters
from ...models.peft.apply import trained_parameters
from ..optim.base_optimizer import Optimizer
from ..utils.errors import UserError
from ..utils.local_shard import Piece, piece_of
from ..utils.safetensors_io import DamagedFileError, FileRecord, check_file, read_json
from .loop_state import LoopState
from .sharded_safetensors import Overlaid, WholeTensors, files_of, open_whole, read_pieces

FORMAT = 1
WEIGHTS, ADAPTER, OPTIMIZER, AVERAGE = "model", "adapter", "optimizer", "ema"
"""Kinds of tensor files."""
STATE, CONFIG, TOKENIZER, MANIFEST = "state.json", "config.json", "tokenizer.json", "manifest.json"
_NAME = re.compile(r"step-(\d{1,15})")


class BaseRecord(Block):
    """The frozen weights that an adapter belongs to."""

    path: Annotated[str, Field(min_length=1)]
    """Where they were: a checkpoint, or a folder of Hugging Face's."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the names and hashes of their files; see `base_weights.digest_of`."""


class RunState(Block):
    """What `state.json` holds: where a run stands, and what must be the same for it to go on exactly."""

    step: int = Field(ge=0)
    """Completed optimizer steps."""
    updates: Annotated[int, Field(ge=0)] | None = None
    """Those of them that changed the weights; None in a checkpoint of a version that counted the others too."""
    consumed_samples: int = Field(ge=0)
    """Samples trained on; the position in the data."""
    val_loss: float | None = None
    """Validation loss at this step, in nats per token; None where it was not measured."""
    metrics: dict[str, float] = Field(default={})
    """The other figures of this step that can rank checkpoints, by the names that `monitor` takes."""
    loop: LoopState = LoopState.model_validate({})
    """What the loop remembers besides."""
    seed: int
    """`model.seed`."""
    global_batch_size: int
    """Samples per step."""
    micro_batch_size: int
    """Samples per forward pass; dropout masks depend on it."""
    sequence_length: int
    """Tokens per sample, of the encoder in a T5."""
    decoder_length: int = 0
    """Tokens of a T5's decoder per sample."""
    precision: str
    """The precision plan, in words."""
    optimizer: dict[str, str | int | float | None]
    """Settings of optimizer and schedule."""
    data_fingerprint: str
    """Identity of the training data; empty where nobody knows, in a converted model."""
    data_keys: dict[str, bool | int | float | str | None] = Field(default={})
    """Keys of `model.data` that say how samples are made of them; empty in a checkpoint of a version without."""
    base: BaseRecord | None = None
    """What an adapter was trained on top of; None in a checkpoint of a whole model, and where that was random."""
    versions: dict[str, str]
    """Versions of what computes: stoker, torch, Python."""


class MisfitError(UserError):
    """The tensors of a checkpoint do not fit what they are loaded into; its lines list what differs."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory whose files were verified by `open_checkpoint`.

    Attributes:
        path: the directory.
        state: where the run stood.
        files: names of its files.
        is_averaged: whether its weights are the moving average of those that were trained, see `averaged`.
    """

    path: Path
    state: RunState
    files: tuple[str, ...]
    is_averaged: bool = False

    @property
    def config_document(self) -> dict[str, Any]:
        """The configuration document of the run that wrote it."""
        return _object(self.path / CONFIG)

    @property
    def tokenizer_document(self) -> dict[str, Any]:
        """The document its tokens are rebuilt from: equal documents make equal tokens."""
        return {name: value for name, value in self.saved_tokenizer.items() if name != "chat"}

    @property
    def saved_tokenizer(self) -> dict[str, Any]:
        """The document its tokenizer is rebuilt from, with the chat template that came along."""
        return _object(self.path / TOKENIZER)

    @property
    def has_average(self) -> bool:
        """Whether it holds a moving average of the weights."""
        return bool(files_of(AVERAGE, self.files))

    @property
    def _average_files(self) -> list[Path]:
        return [self.path / name for name in files_of(AVERAGE, self.files)]

    @property
    def weight_files(self) -> list[Path]:
        """The files of the weights, by rank."""
        return [self.path / name for name in files_of(WEIGHTS, self.files)]

    @property
    def adapter_files(self) -> list[Path]:
        """The files of what was trained beside frozen weights, by rank."""
        return [self.path / name for name in files_of(ADAPTER, self.files)]

    @property
    def is_adapter(self) -> bool:
        """Whether it holds what was trained beside frozen weights, and not these."""
        return bool(files_of(ADAPTER, self.files))

    def averaged(self) -> Checkpoint:
        """The same checkpoint with the moving average for its weights; what was not trained stays.

        Raises:
            UserError: it holds none.
        """
        if not self.has_average:
            raise UserError(
                f"--ema: checkpoint {self.path} holds no moving average of its weights; a run that is trained with "
                "exp_manager.ema.enable=True has one"
            )
        return replace(self, is_averaged=True)

    @contextmanager
    def open_weights(self) -> Iterator[WholeTensors | Overlaid]:
        """Open the weights, or what was trained beside frozen ones, to read whole tensors one at a time.

        Raises:
            DamagedFileError: not safetensors files, or of a dtype that no checkpoint has.
        """
        with ExitStack() as stack:
            held = stack.enter_context(open_whole(self.adapter_files if self.is_adapter else self.weight_files))
            if not self.is_averaged:
                yield held
            else:
                yield Overlaid(held, stack.enter_context(open_whole(self._average_files)))

    def load_weights(self, model: nn.Module, *, cast: bool = False) -> None:
        """Copy the weights into a model of the same geometry.

        Args:
            model: its `base_of`, or with an adapter its `trained_of`, are filled in place; they may be DTensors.
            cast: accept other dtypes than the model's, and convert.

        Raises:
            MisfitError: the weights do not fit the model.
            UserError: they cannot be read.
        """
        tensors = trained_of(model) if self.is_adapter else base_of(model)
        pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
        self._fill(ADAPTER if self.is_adapter else WEIGHTS, pieces, cast=cast)
        if self.is_averaged:
            self._fill(AVERAGE, {name: pieces[name] for name in self._averaged_names() if name in pieces}, cast=cast)

    def load_optimizer(self, optimizer: Optimizer) -> None:
        """Copy main weights and state into an optimizer over a model with the same parameters.

        Raises:
            UserError: the tensors do not fit the optimizer; lists what differs.
        """
        self._fill(OPTIMIZER, optimizer.pieces())
        optimizer.step_count = self.state.step if self.state.updates is None else self.state.updates

    def load_average(self, average: Mapping[str, Piece]) -> None:
        """Copy the moving average of the weights.

        Raises:
            UserError: it does not fit; lists what differs.
        """
        self._fill(AVERAGE, average)

    def _averaged_names(self) -> list[str]:
        try:
            with open_whole(self._average_files) as average:
                return list(average.facts)
        except DamagedFileError as error:
            raise UserError(f"checkpoint {self.path} cannot be used: {error}") from None

    def _fill(self, kind: str, destination: Mapping[str, Piece], *, cast: bool = False) -> None:
        paths = [self.path / name for name in files_of(kind, self.files)]
        try:
            with torch.no_grad():
                read_pieces(paths, destination, any_dtype=cast)
        except DamagedFileError as error:
            raise UserError(f"checkpoint {self.path} cannot be used: {error}") from None
        except ValueError as error:
            raise MisfitError(
                [
                    f"checkpoint {self.path} does not fit the model of this configuration:",
                    *(f"  {line}" for line in str(error).splitlines()),
                    f"use the geometry, precision and optimizer it was trained with: {self.path / CONFIG}",
                ]
            ) from None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model, by name: its parameters, and the biases on the choice of experts.

    Such a bias follows no gradient (`expert_balance`), so it is none of the optimizer's.
    """
    biases = {f"{name}.expert_bias": layer.expert_bias for name, layer in moe_layers(model).items()}
    return dict(model.named_parameters()) | {name: bias for name, bias in biases.items() if bias is not None}


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """Those of `weights_of` that the model has without what fine-tuning added."""
    added = set(added_parameters(model))
    return {name: tensor for name, tensor in weights_of(model).items() if name not in added}


def trained_of(model: nn.Module) -> dict[str, Tensor]:
    """Those of `weights_of` that training changes: the parameters that are trained, and the biases that move."""
    biases = {f"{name}.expert_bias": layer.expert_bias for name, layer in moe_layers(model).items() if layer.moves_bias}
    return dict(trained_parameters(model)) | {name: bias for name, bias in biases.items() if bias is not None}


def saved_of(model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """The kind of file that holds a model, and its tensors: of a frozen one what is trained beside it."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return WEIGHTS, weights_of(model)
    return ADAPTER, trained_of(model)


def open_checkpoint(path: Path, *, with_optimizer: bool = True, verify: bool = True) -> Checkpoint:
    """Verify the files of a checkpoint directory and read its state.

    Args:
        path: a directory `step-N`.
        with_optimizer: it must be there; verify the optimizer's file too, the largest. False where it is not going to
            be read.
        verify: compare hashes; False where another rank has done so.

    Raises:
        DamagedFileError: a file is missing, changed or not what it should be.
    """
    if not path.is_dir():
        raise DamagedFileError(f"{path} is not a directory")
    records = read_manifest(path)
    if with_optimizer and not files_of(OPTIMIZER, records):
        raise DamagedFileError("it holds the weights of a converted model alone; use model.restore_from_path")
    unread = () if with_optimizer else files_of(OPTIMIZER, records)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing leaves the interpreter's lock
        checks = [
            pool.submit(check_file, path / name, record)
            for name, record in records.items()
            if verify and name not in unread
        ]
    for check in checks:
        check.result()
    try:
        state = RunState.model_validate(read_json(path / STATE))
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedFileError(f"{STATE}: `{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    if (named := _NAME.fullmatch(path.name)) and int(named[1]) != state.step:
        raise DamagedFileError(f"it holds step {state.step}, not the step it is named after")
    return Checkpoint(path, state, tuple(records))


def newest_checkpoint(
    directory: Path, *, with_optimizer: bool = True, verify: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """The valid checkpoint with the most steps in a directory, and one line for each damaged one passed over."""
    complaints: list[str] = []
    for path in reversed(checkpoint_paths(directory)):
        try:
            return open_checkpoint(path, with_optimizer=with_optimizer, verify=verify), complaints
        except DamagedFileError as error:
            complaints.append(f"{path} is damaged ({error}); using the one before it")
    return None, complaints


def find_checkpoint(path: Path, *, with_optimizer: bool = False, verify: bool = True) -> tuple[Checkpoint, list[str]]:
    """The checkpoint a user means by a path: a `step-N` directory, a directory of them, or a run directory.

    Args:
        path: what the user names.
        with_optimizer: and `verify`: as in `open_checkpoint`.
        verify: see there.

    Returns:
        The checkpoint and one line for each damaged one that was passed over.

    Raises:
        UserError: there is none, or the one that was named is damaged.
    """
    if _NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        try:
            return open_checkpoint(path, with_optimizer=with_optimizer, verify=verify), []
        except DamagedFileError as error:
            raise UserError(f"checkpoint {path} cannot be used: {error}") from None
    complaints: list[str] = []
    for directory in (path, path / "checkpoints"):
        checkpoint, found = newest_checkpoint(directory, with_optimizer=with_optimizer, verify=verify)
        complaints += found
        if checkpoint is not None:
            return checkpoint, complaints
    raise UserError([f"no usable checkpoint in {path}: {_cure(path)}", *complaints])


def _cure(path: Path) -> str:
    """What to do where a path holds no checkpoint."""
    from ..conversion.from_peft import is_peft_folder
    from ..conversion.pretrained import is_foreign  # both import this module

    if not path.exists():
        return "there is no such folder"
    if is_peft_folder(path):
        return (
            "it is an adapter in peft's format; name it in model.peft.restore_from_path, or make a checkpoint of it: "
            f"stoker convert {path} FOLDER"
        )
    if is_foreign(path):
        return f"it is a model of Hugging Face's; make a checkpoint of it: stoker convert {path} FOLDER"
    return "give a run directory or a `step-N` directory"


def checkpoint_paths(directory: Path) -> list[Path]:
    """The `step-N` directories in a directory, valid or not, by ascending step."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    numbered = [(int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def read_manifest(checkpoint: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint directory and what its manifest says of each.

    Raises:
        DamagedFileError: the manifest is not what it should be.
    """
    document = read_json(checkpoint / MANIFEST, as_written=True)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DamagedFileError(f"{MANIFEST} is not of format {FORMAT}")
    files = document.get("files")
    if not isinstance(files, dict):
        raise DamagedFileError(f"{MANIFEST} lists no files")
    tensors = [name for kind in (WEIGHTS, ADAPTER, OPTIMIZER, AVERAGE) for name in files_of(kind, files)]
    held = [kind for kind in (WEIGHTS, ADAPTER) if files_of(kind, files)]
    if set(files) != {*tensors, STATE, CONFIG, TOKENIZER} or len(held) != 1:
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
    try:
        document = read_json(path)
    except DamagedFileError as error:
        raise UserError(f"checkpoint {path.parent} cannot be used: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"checkpoint {path.parent} cannot be used: {path.name} is not a JSON object")
    return document
