"""LightningModule: one `training_step` is one global batch and one optimizer step.

The loss of every micro batch is divided by the number of target tokens of the whole global batch over all ranks, so
gradient accumulation and data parallelism are exact however labels are distributed. The random generators are reseeded
before every micro batch from (seed, step, micro batch index), so a resumed run has the same dropout masks without saved
RNG state, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.fp8.delayed_scaling import DelayedScaling
from ...models.fp8 import cast_fp8_weights
from ...models.memory.offload_weights import find_weight_offloads
from ...models.parallel.stages import StageInput
from ..config.lr_schedule import Schedule
from ..config.run_precision import RunPrecision
from ..data.dataloader import GlobalBatch, MicroBatch, PrefetchingDataLoader
from ..device.precision import autocast_context
from ..distributed.data_parallel import DataParallel
from ..distributed.pipeline import Pipeline
from ..distributed.process_group import DistributedContext
from ..optim.base_optimizer import Optimizer
from ..optim.fp8_weights import Fp8Weights
from ..utils.async_host_copy import AsyncHostCopy
from .cuda_graph import Fields, RunMicroBatch
from .expert_balance import ExpertBalancer
from .lightning_imports import pl


class StepMetrics(NamedTuple):
    """Metrics of a step.

    Attributes:
        loss: loss of the global batch, nats per token.
        grad_norm: gradient norm before clipping; not finite in a skipped step.
        loss_scale: loss scale of the step; None except in fp16.
    """

    loss: float
    grad_norm: float
    loss_scale: float | None = None


class LanguageModule(pl.LightningModule):
    """Train a language model with manual optimization.

    Args:
        model: a model with `batch_loss(fields, denominator)`, as all families have.
        optimizer: optimizer of the parameters of `model`.
        schedule: learning rate by completed steps.
        dataloader: dataloader of global batches, starting at `step`.
        precision: autocast of the forward pass.
        seed: seed of dropout, combined with step and micro batch.
        ranks: all ranks of the run; None for one process.
        replicas: the ranks with the same part of the model, whose gradients add up; None: `ranks`.
        losses: the ranks whose losses add up: those, and the stages of their pipelines; None: `replicas`.
        data_parallel: the data-parallel strategy of the model; None for one process.
        pipeline: builds the pipeline of this rank, given what to call after each backward pass of a stage; None for one
            rank.
        graph_capture: wraps the function that runs a micro batch, see `cuda_graph.py`; None: eager.
        expert_balancer: called before and after each step; None without experts.
        fp8_modules: those whose weights are cast to fp8 once for all micro batches of a step, not for each.
        fp8_scales: state of delayed scaling, which is updated once a step; None without.
        fp8_weights: weights that are cast from main weights after each update; None without.
        waits_for_weights: weights of other ranks must be there after each step, for callbacks that may read them.

    Attributes:
        unwrapped_optimizer: the unwrapped optimizer; Lightning wraps it.
        step: completed optimizer steps.
        lr: learning rate of the last step.
        pending_metrics: loss, gradient norm and in fp16 loss scale of each step since the last read, as device tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        dataloader: PrefetchingDataLoader,
        precision: RunPrecision,
        *,
        seed: int,
        step: int = 0,
        ranks: DistributedContext | None = None,
        replicas: DistributedContext | None = None,
        losses: DistributedContext | None = None,
        data_parallel: DataParallel | None = None,
        pipeline: Callable[[Callable[[], None]], Pipeline] | None = None,
        graph_capture: Callable[[RunMicroBatch], RunMicroBatch] | None = None,
        expert_balancer: ExpertBalancer | None = None,
        fp8_modules: Sequence[nn.Module] = (),
        fp8_scales: DelayedScaling | None = None,
        fp8_weights: Fp8Weights | None = None,
        waits_for_weights: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model: Any = model
        self.unwrapped_optimizer = optimizer
        self.schedule = schedule
        self.dataloader = dataloader
        self.precision = precision
        self.seed = seed
        self.step = step
        self.ranks = ranks or DistributedContext()
        self.replicas = replicas or self.ranks
        self.losses = losses or self.replicas
        self.data_parallel = data_parallel
        if data_parallel is not None:
            data_parallel.attach(self.model, optimizer)  # pyrefly: ignore[bad-argument-type]
        self._run_micro_batch: RunMicroBatch = (
            self._loss_and_gradients if graph_capture is None else graph_capture(self._loss_and_gradients)
        )
        self._accumulates = False
        self.pipeline = None if pipeline is None else pipeline(self._accumulate)
        self.expert_balancer = expert_balancer
        self._fp8_modules = list(fp8_modules)
        self._fp8_scales = fp8_scales
        self._fp8_weights = fp8_weights
        self._weight_offloads = find_weight_offloads(model)
        self._waits_for_weights = waits_for_weights
        self.lr = schedule(step)
        self.pending_metrics: list[tuple[Tensor, ...]] = []

    def configure_optimizers(self) -> Optimizer:
        """Return the one optimizer, so that Lightning's global step counts global batches."""
        return self.unwrapped_optimizer

    def train_dataloader(self) -> PrefetchingDataLoader:
        """Return the dataloader; it is infinite, `max_steps` ends the run."""
        return self.dataloader

    def transfer_batch_to_device(self, batch: GlobalBatch, device: torch.device, dataloader_idx: int) -> GlobalBatch:
        """Return the batch as is: the dataloader has already copied it to the device."""
        return batch

    def release_graphs(self) -> None:
        """Free captured graphs: a communicator of NCCL that they hold cannot be destroyed before them (it hangs)."""
        self._run_micro_batch = self._loss_and_gradients
        for stack in self.model.stacks:
            stack.release_graphs()

    def training_step(self, batch: GlobalBatch, batch_idx: int) -> None:
        """Run forward and backward of every micro batch, clip, update, advance the LR schedule; no host sync."""
        optimizer: Any = self.optimizers()
        state = self.unwrapped_optimizer
        device = batch.labels.device
        targets = self.replicas.all_reduce_(batch.num_targets).clamp(min=1)
        loss_scale = None if state.loss_scale is None else state.loss_scale.scale
        if loss_scale is not None:  # the loss divides the gradient of the logits by this in fp32, before it is rounded
            targets = targets / loss_scale
        if self.expert_balancer is not None:
            self.expert_balancer.before_step(self.step, loss_scale)
        cast_fp8_weights(self._fp8_modules)
        losses: list[Tensor] = []
        if self.data_parallel is not None:
            self.data_parallel.before_step(len(batch.indices))
        self._accumulates = len(batch.indices) > 1 and not (
            self.data_parallel and self.data_parallel.accumulates_gradients
        )
        if self.pipeline is not None:
            losses = self._run_pipeline(self.pipeline, list(batch.micro_batches()), targets)
        else:
            for number, fields in batch.micro_batches():
                seed_generators(micro_batch_seed(self.seed, self.step, number), device)
                losses.append(self._run_micro_batch(fields, targets))
                self._accumulate()
        if self._fp8_scales is not None:
            self._fp8_scales.update(self.step)
        self.lr = self.schedule(self.step)
        state.set_lr(self.lr)
        if self.data_parallel is not None:
            self.data_parallel.before_update()
        for offload in self._weight_offloads:  # a layer without a backward pass has not fetched its weights
            offload.to_device()
        optimizer.step()
        if self._fp8_weights is not None:
            self._fp8_weights.cast()
        if self.data_parallel is not None:
            self.data_parallel.after_update()
            if self._waits_for_weights:
                self.data_parallel.wait_for_weights()
        self.step += 1
        self.ranks.report_step(self.step)
        assert state.grad_norm is not None
        if self.expert_balancer is not None:
            self.expert_balancer.after_update(state.grad_norm)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        if loss_scale is None:
            self.pending_metrics.append((loss, state.grad_norm))
        else:
            self.pending_metrics.append((loss / loss_scale, state.grad_norm, loss_scale))

    def wait_for_weights(self) -> None:
        """Make the current stream wait for weights that are gathered from other ranks: before they are read after a
        step, but by its layers.
        """
        if self.data_parallel is not None:
            self.data_parallel.wait_for_weights()

    def _loss_and_gradients(self, fields: Fields, targets: Tensor) -> Tensor:
        """Run forward and backward of one micro batch without a host sync; return its loss, accumulate into `.grad`."""
        with autocast_context(self.precision, targets.device):
            loss = self.model.batch_loss(fields, targets)
        # Not `manual_backward`: its hooks and loss scaling do nothing here, but cost about as much as a small kernel.
        loss.backward()
        return loss.detach()

    def _accumulate(self) -> None:
        """Add the gradients of a backward pass to the sums of the step."""
        if self._accumulates:
            self.unwrapped_optimizer.accumulate()

    def _run_pipeline(self, pipeline: Pipeline, batches: Sequence[MicroBatch], targets: Tensor) -> list[Tensor]:
        """Run forward and backward of all micro batches through the stages of this rank; return their losses, which are
        0 on ranks without the last stage.
        """

        def run(index: int, at: StageInput) -> tuple[Tensor, ...]:
            number, fields = batches[index]
            seed_generators(micro_batch_seed(self.seed, self.step, number), targets.device)
            with autocast_context(self.precision, targets.device):
                return self.model.run_stage(at, fields, targets)

        return pipeline.step(len(batches), run) or [torch.zeros_like(targets)]

    def read_metrics_async(self) -> Callable[[], list[StepMetrics]]:
        """Start copying the metrics of the steps since the last call to the host, oldest first.

        Returns:
            A function that waits for the values and returns them: with `ExpertLoadMetrics.collect`, the only host sync.
        """
        if not self.pending_metrics:
            return list
        # The loss is a partial sum of each data-parallel rank; the gradient norm is already global.
        losses, *others = (
            torch.stack(list(map(Tensor.float, each))) for each in zip(*self.pending_metrics, strict=True)
        )
        self.pending_metrics.clear()
        values = AsyncHostCopy(torch.stack([self.losses.all_reduce_(losses), *others]))
        return lambda: [StepMetrics(*step) for step in zip(*values.get().tolist(), strict=True)]

    def read_metrics(self) -> list[StepMetrics]:
        """Return the metrics of the steps since the last call, oldest first; waits for the device."""
        return self.read_metrics_async()()


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return a 63-bit seed for the random generators: a hash of the arguments."""
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
