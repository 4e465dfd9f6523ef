"""Generation and evaluation on ranks that share a model, in forked gloo ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from parallel_models import on_ranks


def results(directory: str, checkpoints: list[str], size: int, stages: int, ema: bool) -> list[dict[str, Any]]:
    """Return for each checkpoint the tokens, the loss of evaluation, and the number of weights of layers."""
    if size == 1:
        return [_answers(Path(checkpoint), None, ema) for checkpoint in checkpoints]
    run = partial(_of_rank, stages=stages, ema=ema)
    return on_ranks(directory, size, run, [[checkpoint] for checkpoint in checkpoints])


def _of_rank(rank: int, size: int, checkpoint: str, *, stages: int, ema: bool) -> dict[str, Any]:
    from stoker.models.parallel.layout import ParallelLayout
    from stoker.models.parallel.stages import PipelineSplit
    from stoker.trainer.distributed.mesh import build_mesh
    from stoker.trainer.distributed.process_group import DistributedContext

    layout = ParallelLayout(tensor=size // stages, pipeline=stages)
    split = PipelineSplit(ranks=stages) if stages > 1 else None
    return _answers(Path(checkpoint), build_mesh(layout, None, DistributedContext(rank, size), split), ema)


def _answers(checkpoint: Path, ranks: Any, ema: bool) -> dict[str, Any]:
    from stoker.models.bert import BERT
    from stoker.trainer.checkpoint.hf_files import is_hf_folder
    from stoker.trainer.conversion.load_model import load_model
    from stoker.trainer.data.build_datasets import build_data
    from stoker.trainer.evaluation.held_out_loss import evaluate, loss_function
    from stoker.trainer.generation.beam_search import BeamSearchConfig
    from stoker.trainer.generation.sampling import SamplingParams
    from stoker.trainer.generation.text_generator import Generator, StoppingCriteria

    loaded = load_model(checkpoint, "cpu", ema=ema, ranks=ranks)
    weights = sum(each.numel() for name, each in loaded.model.named_parameters() if ".layers." in name)
    found: dict[str, Any] = {"weights": weights, "loss": 0.0}
    if not is_hf_folder(checkpoint):  # which has no data
        data = build_data(loaded.run.data, loaded.tokenizer)
        assert data.validation is not None
        found["loss"] = evaluate(
            loss_function(loaded.model, loaded.precision, loaded.device), data.validation,
            token_bytes=data.token_byte_counts, batch_size=2, limit_batches=2, device=loaded.device,
        ).loss  # fmt: skip
    if isinstance(loaded.model, BERT):
        return found
    generator, prompts = Generator.from_restored(loaded), [list(range(3, 9)), list(range(10, 13))]
    limits = StoppingCriteria(6, eos_ids=())
    for name, sampling in (("greedy", SamplingParams(0.0)), ("sampled", SamplingParams(0.9, 20))):
        found[name] = [output.tokens for output in generator.generate(prompts, limits, sampling, [5, 6])]
    found["beams"] = [output.tokens for output in generator.beam_search(prompts, limits, BeamSearchConfig(3))]
    return found
