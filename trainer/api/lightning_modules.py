"""LightningModules of the model families, for any `pl.Trainer`.

They use automatic optimization: a batch is a micro batch, the Trainer accumulates, and the optimizer of the
configuration clips and steps. Losses are divided by the number of target tokens of the whole global batch, as in
`stoker train`, whose weights they reach bit for bit on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..config.load import config_from_document
from ..config.lr_schedule import Schedule
from ..config.resolved_run import ResolvedRun
from ..config.run_config import RunConfig
from ..config.schema.optim import build_schedule
from ..core.run_checks import choose_attention
from ..core.training_state import build_data_parallel, build_model, build_optimizer
from ..data.datasets.samples import IGNORE_INDEX
from ..data.tokenizers.vocabulary import configured_tokenizer
from ..device.precision import autocast_context
from ..distributed.data_parallel import DataParallel
from ..distributed.mesh import Mesh, build_mesh
from ..distributed.process_group import DistributedContext
from ..lightning.expert_balance import ExpertBalancer, build_expert_balancer
from ..lightning.lightning_imports import ModelParallelStrategy, pl
from ..lightning.lightning_module import micro_batch_seed, seed_generators
from ..optim.base_optimizer import Optimizer
from ..utils.errors import UserError
from .runs import check_config
from .token_data_module import TokenDataModule, ranks_of
from .trainer_arguments import resolve_for_trainer, schedule_length, set_accumulation, warn_of_unused_keys


class TransformerModule(pl.LightningModule):
    """Base class of `GPTModule`, `T5Module` and `BertModule`.

    A batch is a mapping of the tensors that the family's model takes, such as `tokens` and `labels` of a GPT, int64
    [B, S] with -100 at ignored labels, and S the sequence length of the configuration. Those of `TokenDataModule` also
    hold the number of targets of their global batch; the loss of any other is its own mean.

    Training logs `loss`, of each global batch, `grad_norm`, and in fp16 `loss_scale`; validation `val_loss` and test
    `test_loss`, the mean over all targets, and likewise each of `trainer.validation_metrics`.

    Args:
        config: from `stoker.load_config`; or its document, as checkpoints of Lightning's have it.
        vocab_size: vocabulary size of the tokenizer; None: that of the Trainer's `TokenDataModule`, or of the tokenizer
            in the configuration.

    Attributes:
        model: the model, after `configure_model`.

    Raises:
        UserError: the configuration is that of another family.
    """

    family = ""

    def __init__(self, config: RunConfig | Mapping[str, Any], vocab_size: int | None = None) -> None:
        super().__init__()
        if isinstance(config, Mapping):
            config = config_from_document(config)
        check_config(config)
        self.config = config
        if self.config.root.model.family != self.family:
            found = self.config.root.model.family
            raise UserError(
                f"`model.family` ({found}) must be {self.family} for {type(self).__name__}; use "
                f"{_NAMES.get(found, 'another class')}"
            )
        self.save_hyperparameters({"config": self.config.document, "vocab_size": vocab_size})
        self.model: Any = None
        self._vocab_size = vocab_size
        self._run: ResolvedRun | None = None
        self._mesh: Mesh | None = None
        self._data_parallel: DataParallel | None = None
        self._expert_balancer: ExpertBalancer | None = None
        self._micro_batches = 1
        self._real_vocab_size = 0
        self._loss: Tensor | None = None
        self._loss_scale: Tensor | None = None

    @property
    def run(self) -> ResolvedRun:
        """The resolved configuration, after `configure_model`."""
        assert self._run is not None
        return self._run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; see `stoker.models`' `GPT.forward`, `T5.forward` and `BERT.forward`."""
        if self.model is None:
            self.configure_model()
        model: Any = self.model
        return model(*args, **kwargs)

    def configure_model(self) -> None:
        """Build the model with its initial weights on the device of the Trainer; on the CPU without one.

        Raises:
            UserError: the configuration and the arguments of the Trainer contradict each other, or the model cannot run
                there.
        """
        if self.model is not None:
            return
        trainer = self._trainer
        if trainer is None:
            device, self._run = torch.device("cpu"), self.config.resolved
        else:
            device, self._run = trainer.strategy.root_device, resolve_for_trainer(self.config, trainer)
            warn_of_unused_keys(self.config, trainer)
            self._micro_batches = set_accumulation(self._run, trainer)
            plugin: Any = trainer.precision_plugin
            if self._run.precision.scales_loss and hasattr(plugin, "scaler"):
                plugin.scaler = None  # the optimizer has a loss scale of its own
            if isinstance(trainer.strategy, ModelParallelStrategy):
                _check_saved_state(trainer)
                self._mesh = build_mesh(self._run.mesh, None, ranks_of(trainer))
                self._data_parallel = build_data_parallel(self._run, device, self._mesh)
        vocab_size = self._find_vocab_size()
        self._real_vocab_size = self._run.with_vocabulary(vocab_size).vocab_size
        self.model = build_model(
            self._run,
            vocab_size,
            device,
            choose_attention(self._run, device),
            self._data_parallel,
            self._mesh,
        )
        data = self._mesh.data if self._mesh is not None else ranks_of(trainer)
        total = self._run.model.global_batch_size // self._run.model.micro_batch_size
        self._expert_balancer = build_expert_balancer(self._run.model, self.model, lambda step: total, data)

    def configure_optimizers(self) -> Any:
        """Return the optimizer and the learning-rate schedule of `model.optim`."""
        run, trainer = self.run, self.trainer
        optimizer = build_optimizer(run, self.model, self._data_parallel, self._mesh, ranks_of(trainer))
        if self._data_parallel is not None:
            self._data_parallel.attach(self.model, optimizer)
        schedule = build_schedule(run.model.optim, schedule_length(self.config, run, trainer))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ScheduledLR(optimizer, schedule), "interval": "step", "name": "lr"},
        }

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a micro batch: its share of the loss of the global batch, times the number of shares."""
        fields = self._fields(batch, check_ids=batch_idx == 0)
        step, labels = self.trainer.global_step, fields["labels"]
        index = batch_idx % self._micro_batches
        number = batch.get("micro_batch", index * self._data_ranks.world_size + self._data_ranks.rank)
        if index == 0:
            self._start_step(step)
        if "num_targets" in batch:
            # Lightning divides by the number of micro batches, and DDP by that of ranks; our own strategies by none.
            targets, shares = self._sum_over_ranks(batch["num_targets"]), self._micro_batches * self._averaging_ranks
        else:
            targets = (labels != IGNORE_INDEX).sum()
            shares = self._averaging_ranks / self._data_ranks.world_size
        seed_generators(micro_batch_seed(self.run.model.seed, step, number), labels.device)
        targets = targets.clamp(min=1).to(torch.float32)
        with _default_dtype(torch.float32), autocast_context(self.run.precision, labels.device):
            loss = self.model.batch_loss(fields, targets if self._loss_scale is None else targets / self._loss_scale)
        part = loss.detach() if "num_targets" in batch else loss.detach() / self._micro_batches
        self._loss = part if self._loss is None or index == 0 else self._loss + part
        return loss if shares == 1 else loss * shares

    def on_after_backward(self) -> None:
        """Add the gradients of a micro batch to the fp32 sums of the optimizer, on one device."""
        if self._micro_batches > 1 and self.trainer.world_size == 1:
            self._optimizer.accumulate()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Wait for the reductions of gradients."""
        if self._data_parallel is not None:
            self._data_parallel.before_update()

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Do nothing: the optimizer clips to the global norm, of `trainer.gradient_clip_val` or the Trainer's."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Update the weights and log the loss of the global batch and the gradient norm before clipping."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        norm = self._optimizer.grad_norm
        if self._data_parallel is not None:
            self._data_parallel.gather_weights()
        if self._expert_balancer is not None and norm is not None:
            self._expert_balancer.after_update(norm)
        assert self._loss is not None
        shares, scale, self._loss = self._loss.float(), self._loss_scale, None
        if scale is not None:
            shares = shares / scale
            self.log("loss_scale", scale, batch_size=1)
        self.log("loss", self._sum_over_ranks(shares), prog_bar=True, batch_size=1)
        if norm is not None:
            self.log("grad_norm", norm.float(), batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop after the user's `trainer.max_steps`, which the Trainer may not have been given."""
        steps = self.run.trainer.max_steps
        if self.config.is_set("trainer.max_steps") and 0 < steps <= self.trainer.global_step:
            self.trainer.should_stop = True

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log `val_loss`, the mean cross-entropy of all targets, nats per token."""
        self._log_loss("val_loss", batch)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log `test_loss`."""
        self._log_loss("test_loss", batch)

    def on_validation_end(self) -> None:
        """Free the weights gathered for the validation."""
        if self._data_parallel is not None:
            self._data_parallel.reshard()

    def _log_loss(self, name: str, batch: Mapping[str, Any]) -> None:
        fields = self._fields(batch)
        targets = int((fields["labels"] != IGNORE_INDEX).sum())
        one = torch.ones((), dtype=torch.float32, device=fields["labels"].device)
        with _default_dtype(torch.float32), autocast_context(self.run.precision, one.device):
            total = self.model.batch_loss(fields, one)
        distributed = self.trainer.world_size > 1
        names = [name, *(f"{name.removesuffix('loss')}{metric}" for metric in self.run.trainer.validation_metrics)]
        for each, value in zip(names, total.float().reshape(-1) / max(targets, 1), strict=True):
            self.log(each, value, batch_size=targets, sync_dist=distributed, prog_bar=True, on_epoch=True)

    def _fields(self, batch: Any, *, check_ids: bool = False) -> dict[str, Tensor]:
        """Return the tensors of a batch that the model takes.

        Raises:
            UserError: some are missing, or are no ids of tokens.
        """
        named = batch if isinstance(batch, Mapping) else {}
        fields = {name: field for name, field in named.items() if isinstance(field, Tensor) and name != "num_targets"}
        needed = _FIELDS[self.family]
        if missing := [name for name in needed if name not in fields]:
            found = ", ".join(named) or type(batch).__name__
            raise UserError(
                f"a batch for {type(self).__name__} must be a mapping with the tensors {', '.join(needed)}, but this "
                f"has {found} without {' and '.join(missing)}; `labels` are the tokens that follow (docs/library.md)"
            )
        for name in needed:
            if fields[name].is_floating_point():
                raise UserError(f"`{name}` ({fields[name].dtype}) of a batch must be int64, ids of tokens")
            if check_ids and (largest := int(fields[name].max())) >= self._real_vocab_size:
                raise UserError(
                    f"`{name}` of a batch has the id {largest}, beyond the vocabulary of {self._real_vocab_size}"
                )
        return fields

    def _start_step(self, step: int) -> None:
        scale = self._optimizer.loss_scale
        self._loss_scale = None if scale is None else scale.scale
        if self._expert_balancer is not None:
            self._expert_balancer.before_step(step, self._loss_scale)
        if self._data_parallel is not None:
            self._data_parallel.before_step(self._micro_batches)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        ranks = self._mesh.replicas if self._mesh is not None else self._data_ranks
        return ranks.all_reduce_(value.clone()) if ranks.world_size > 1 else value

    @property
    def _data_ranks(self) -> DistributedContext:
        return self._mesh.data if self._mesh is not None else ranks_of(self._trainer)

    @property
    def _averaging_ranks(self) -> int:
        """Ranks over which the strategy averages gradients; 1 where they are summed."""
        return 1 if self._mesh is not None else self.trainer.world_size

    @property
    def _optimizer(self) -> Optimizer:
        found: Any = self.optimizers(use_pl_optimizer=False)
        return found

    def _find_vocab_size(self) -> int:
        if self._vocab_size is not None:
            return self._vocab_size
        data: Any = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            return data.vocab_size
        spec = self.config.resolved.data
        return spec.vocab_size or configured_tokenizer(spec).vocab_size


class GPTModule(TransformerModule):
    """Decoder-only model (`model.family: gpt`) with its loss, optimizer and schedule, for any `pl.Trainer`.

    `config` is from `stoker.load_config`; `vocab_size` is that of the tokenizer, needed unless the Trainer has a
    `TokenDataModule` or the configuration names the tokenizer. A batch is a mapping with
    `tokens` and `labels`, int64 [B, S], -100 at ignored labels.
    """

    family = "gpt"


class T5Module(TransformerModule):
    """Encoder-decoder model (`model.family: t5`) with its loss, optimizer and schedule, for any `pl.Trainer`.

    `config` is from `stoker.load_config`; `vocab_size` is that of the tokenizer, needed unless the Trainer has a
    `TokenDataModule` or the configuration names the tokenizer. A batch is a mapping with
    `encoder_tokens` [B, S], `decoder_tokens` and `labels` [B, D], int64, -100 at ignored labels.
    """

    family = "t5"


class BertModule(TransformerModule):
    """Encoder-only model (`model.family: bert`) with its loss, optimizer and schedule, for any `pl.Trainer`.

    `config` is from `stoker.load_config`; `vocab_size` is that of the tokenizer, needed unless the Trainer has a
    `TokenDataModule` or the configuration names the tokenizer. A batch is a mapping with
    `tokens` and `labels`, int64 [B, S], -100 at ignored labels.
    """

    family = "bert"


_FIELDS: Mapping[str, tuple[str, ...]] = {
    "gpt": ("tokens", "labels"),
    "bert": ("tokens", "labels"),
    "t5": ("encoder_tokens", "decoder_tokens", "labels"),
}
"""Tensors that every batch of a family has."""
_NAMES = {kind.family: kind.__name__ for kind in (GPTModule, T5Module, BertModule)}


class ScheduledLR(LRScheduler):
    """Learning rate of a schedule: a function of the completed steps."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which is code: it follows from the configuration."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group after `last_epoch` steps."""
        return [self.schedule(self.last_epoch)] * len(self.optimizer.param_groups)


def _check_saved_state(trainer: pl.Trainer) -> None:
    """Check that no optimizer state is to be saved, which this strategy could not.

    Raises:
        UserError: a callback would save it.
    """
    if any(not getattr(callback, "save_weights_only", True) for callback in trainer.checkpoint_callbacks):
        raise UserError(
            "ModelParallelStrategy cannot save the state of this optimizer; use "
            "ModelCheckpoint(save_weights_only=True) or Trainer(enable_checkpointing=False), or stoker train, which "
            "resumes on any layout"
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, which Lightning's half-precision plugin changes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
