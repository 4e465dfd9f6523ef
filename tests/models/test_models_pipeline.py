"""The stages of a pipeline, run one after the other in one process, have the loss and the gradients of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_models import build, samples_of

from stoker.models.parallel.pipeline import PipelineParallel
from stoker.models.parallel.stages import PipelineSplit, StageInput

DROPOUT = {"hidden_dropout": 0.1, "ffn_dropout": 0.1, "attention_dropout": 0.1}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1.0}
UNTIED = {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": False}
COUNTED = PipelineSplit(ranks=3, counts_embedding=True, counts_loss=True)
CASES: list[tuple[dict[str, Any], PipelineSplit, str]] = [
    ({"num_layers": 4, **DROPOUT}, PipelineSplit(ranks=2, chunks=2), "packed"),
    ({"num_layers": 4, **UNTIED}, COUNTED, "restarted"),
    ({"num_layers": 3, "position_embedding_type": "relative", **MOE}, PipelineSplit(ranks=3), ""),
    ({"family": "bert", "num_layers": 4, **DROPOUT}, PipelineSplit(ranks=2, first_layers=1), "padded"),
    (
        {"family": "t5", "position_embedding_type": "relative", **DROPOUT},
        PipelineSplit(ranks=2, encoder_ranks=1),
        "packed",
    ),
    (
        {"family": "t5", "position_embedding_type": "relative", **DROPOUT},
        PipelineSplit(ranks=3, encoder_ranks=2),
        "padded",
    ),
]


@pytest.mark.parametrize(("changes", "split", "samples"), CASES)
def test_stages_have_the_gradients_of_the_model(changes: dict[str, Any], split: PipelineSplit, samples: str) -> None:
    whole = build(changes, samples=samples)
    ranks = [build(changes, samples=samples, pipeline=PipelineParallel(rank, split)) for rank in range(split.ranks)]
    batch = samples_of(changes.get("family", "gpt"), samples)
    torch.manual_seed(2)
    loss = whole.batch_loss(batch, 27.0)
    loss.backward()

    passed: Any = ()
    for number in range(split.num_stages):
        (model,) = (each for each in ranks if number in [stage.number for stage in each.pipeline.stages])
        (stage,) = (stage for stage in model.pipeline.stages if stage.number == number)
        torch.manual_seed(2)
        passed = model.run_stage(StageInput(stage, passed), batch, 27.0)
    passed[0].backward()

    assert passed[0].item() == pytest.approx(loss.item(), rel=1e-14)
    own = [dict(model.named_parameters()) for model in ranks]
    for name, parameter in whole.named_parameters():
        holders = [each[name] for each in own if name in each]
        assert holders, name
        assert all(torch.equal(each, parameter) for each in holders)
        gradients = [each.grad for each in holders if each.grad is not None]
        assert torch.allclose(torch.stack(gradients).sum(0), parameter.grad, rtol=1e-12, atol=1e-14), name
        shared = {rank for rank, each in enumerate(own) if name in each}
        if len(shared) > 1:
            assert all(ranks[rank].pipeline.shared[name] == tuple(sorted(shared)) for rank in shared)
