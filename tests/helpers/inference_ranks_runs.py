"""Generation and evaluation on ranks that share a model, in forked gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel_models import on_ranks


def results(directory: str, checkpoints: list[str], size: int) -> list[dict[str, Any]]:
    """Return for each checkpoint the tokens, the loss of evaluation, and the number of weights."""
    if size == 1:
        return [_answers(Path(checkpoint), None) for checkpoint in checkpoints]
    return on_ranks(directory, size, _of_rank, [[checkpoint] for checkpoint in checkpoints])


def _of_rank(rank: int, size: int, checkpoint: str) -> dict[str, Any]:
    import torch.distributed as dist

    from stoker.models.parallel.collectives import TensorParallel

    group: Any = dist.group.WORLD
    return _answers(Path(checkpoint), TensorParallel(rank, size, group.group_name))


def _answers(checkpoint: Path, ranks: Any) -> dict[str, Any]:
    from stoker.trainer.conversion.load_model import load_model
    from stoker.trainer.data.build_datasets import build_data
    from stoker.trainer.evaluation.held_out_loss import evaluate, loss_function
    from stoker.trainer.generation.sampling import SamplingParams
    from stoker.trainer.generation.text_generator import Generator, StoppingCriteria

    loaded = load_model(checkpoint, "cpu", ranks=ranks)
    data = build_data(loaded.run.data, loaded.tokenizer)
    assert data.validation is not None
    loss = evaluate(
        loss_function(loaded.model, loaded.precision, loaded.device), data.validation,
        token_bytes=data.token_byte_counts, batch_size=2, limit_batches=2, device=loaded.device,
    ).loss  # fmt: skip
    generator, prompts = Generator.from_restored(loaded), [list(range(3, 9)), list(range(40, 43))]
    found: dict[str, Any] = {"loss": loss}
    for name, sampling in (("greedy", SamplingParams(0.0)), ("sampled", SamplingParams(0.9, 20))):
        outputs = generator.generate(prompts, StoppingCriteria(6, eos_ids=()), sampling, [5, 6])
        found[name] = [list(output.tokens) for output in outputs]
    found["weights"] = sum(parameter.numel() for parameter in loaded.model.parameters())
    return found
