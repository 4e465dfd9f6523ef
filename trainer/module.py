"""The LightningModule: one `training_step` is one global batch and one optimizer step.

Every micro batch's loss is divided by the number of target tokens of the whole global batch, so accumulation is exact
whatever the micro batch size and however labels are distributed. The random generators are seeded anew before every
micro batch from (seed, step, micro batch), so a resumed run draws the same dropout masks without any saved state.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from .feed import BatchFeed, GlobalBatch
from .optim import AdamW
from .precision import PrecisionPlan
from .schedule import Schedule


class LanguageModule(pl.LightningModule):
    """Trains a language model by manual optimization.

    Args:
        model: has `loss(tokens, labels, denominator)`, as `models.gpt.GPT` does.
        optimizer: over the parameters of `model`.
        schedule: completed steps to learning rate.
        feed: the global batches, from `step` on.
        precision: autocast of the forward pass.
        micro_batch_size: samples per forward pass.
        accumulates: whether a global batch has several micro batches.
        seed: seeds dropout, with step and micro batch.
        step: completed optimizer steps.

    Attributes:
        step: completed optimizer steps.
        lr: learning rate of the last step.
        unread: loss and gradient norm of each step since they were last read, as tensors on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        schedule: Schedule,
        feed: BatchFeed,
        precision: PrecisionPlan,
        *,
        micro_batch_size: int,
        accumulates: bool,
        seed: int,
        step: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model: Any = model
        self.adamw = optimizer
        self.schedule = schedule
        self.feed = feed
        self.precision = precision
        self.micro_batch_size = micro_batch_size
        self.accumulates = accumulates
        self.seed = seed
        self.step = step
        self.lr = schedule(step)
        self.unread: list[tuple[Tensor, Tensor]] = []

    def configure_optimizers(self) -> AdamW:
        """One optimizer, so that Lightning's global step counts once per global batch."""
        return self.adamw

    def train_dataloader(self) -> BatchFeed:
        """Endless; the step count ends a run."""
        return self.feed

    def transfer_batch_to_device(self, batch: GlobalBatch, device: torch.device, dataloader_idx: int) -> GlobalBatch:
        """Nothing to do: the feed has copied it ahead."""
        return batch

    def training_step(self, batch: GlobalBatch, batch_idx: int) -> None:
        """Forward and backward of every micro batch, then clip, update and advance the schedule; no host sync."""
        optimizer: Any = self.optimizers()
        device = batch.tokens.device
        losses: list[Tensor] = []
        for index, (tokens, labels) in enumerate(batch.micro_batches(self.micro_batch_size)):
            seed_generators(micro_batch_seed(self.seed, self.step, index), device)
            with self.precision.context(device):
                loss = self.model.loss(tokens, labels, batch.targets)
            # Not `manual_backward`: its hooks and scaling do nothing here, and cost as much as a small kernel's work.
            loss.backward()
            if self.accumulates:
                self.adamw.accumulate()
            losses.append(loss.detach())
        self.lr = self.schedule(self.step)
        self.adamw.set_lr(self.lr)
        optimizer.step()
        self.step += 1
        assert self.adamw.grad_norm is not None
        self.unread.append((losses[0] if len(losses) == 1 else torch.stack(losses).sum(), self.adamw.grad_norm))

    def read_unread(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of the steps since the last call, oldest first: the one place the host waits."""
        if not self.unread:
            return []
        values = torch.stack([value.float() for pair in self.unread for value in pair]).tolist()
        self.unread.clear()
        return list(zip(values[::2], values[1::2], strict=True))


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit seed for the random generators, a pure function of its arguments."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % (1 << 64), step, micro_batch), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
