"""Report the schedule of a pipeline: layers, memory, times and messages of each of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...models.parallel.schedule import bubble_fraction
from ...models.parallel.stages import Stage
from ..utils.text import format_gib, pluralize
from .run_plan import Plan
from .traffic import axis_ranks, step_traffic


def pipeline_lines(plan: Plan) -> Iterator[str]:
    """Describe the schedule of a pipeline, and for each rank its layers, memory and times."""
    document = pipeline_document(plan)
    bubble, equal = (100 * (document[name] or 0.0) for name in ("bubble", "bubble_if_equal"))
    exact = f" {bubble:.1f} %," if document["bubble"] is not None else ""
    micro = pluralize(plan.inputs.micro_batches, "micro batch", "micro batches")
    yield f"pipeline     {document['schedule']}, {micro}: bubble{exact} {equal:.1f} % if all stages took as long"
    layers = max(6, *(len(each["layers"]) for each in document["ranks"]))
    yield (
        f"  rank  {'layers':<{layers}} {'parameters':>15} {'in flight':>10} {'allocated':>11} {'forward':>10} "
        f"{'backward':>10} {'waits':>7} {'sends':>10}"
    )
    for each in document["ranks"]:
        memory, sent = format_gib(each["allocated"]), format_gib(each["sent"])
        times = [f"{1e3 * each[name]:,.1f} ms" if each[name] is not None else "" for name in ("forward", "backward")]
        waits = "" if each["waits"] is None else f"{100 * each['waits']:.1f} %"
        yield (
            f"  {each['rank']:<5} {each['layers']:<{layers}} {each['parameters']:>15,} {each['in_flight']:>10} "
            f"{memory:>11} {times[0]:>10} {times[1]:>10} {waits:>7} {sent:>10}"
        )


def pipeline_document(plan: Plan) -> dict[str, Any]:
    """Return the schedule of a pipeline and its ranks as a JSON document; times in seconds, of one micro batch."""
    schedule, split, micro = plan.schedule, plan.inputs.run.pipeline, plan.inputs.micro_batches
    assert split is not None
    one_stage = "1F1B" if micro >= split.ranks else "GPipe"
    ranks: list[dict[str, Any]] = []
    for number, (inputs, memory) in enumerate(plan.ranks):
        times = [schedule.times[stage.number] for stage in inputs.stages] if schedule else []
        sent = [each for each in step_traffic(inputs, memory.layers) if each.axis in ("pipeline", "embeddings")]
        ranks.append(
            {
                "rank": number,
                "layers": ", ".join(map(_layers, inputs.stages, (stack.name for stack in inputs.stacks))),
                "parameters": inputs.counts.total,
                "in_flight": memory.in_flight,
                "allocated": plan.ranks[number].allocated,
                "needed": plan.ranks[number].needed,
                "peak_at": memory.peak.where,
                "forward": sum(each.forward for each in times) if schedule else None,
                "backward": sum(each.backward + sum(each.recompute) / micro for each in times) if schedule else None,
                "waits": 1 - schedule.busy[number] / schedule.seconds if schedule else None,
                "sent": round(sum(each.sent_bytes(len(axis_ranks(inputs, each.axis))) for each in sent)),
            }
        )
    return {
        "schedule": one_stage if split.chunks == 1 else f"interleaved 1F1B, {split.chunks} stages on each rank",
        "bubble": schedule.bubble if schedule else None,
        "bubble_if_equal": bubble_fraction(split.ranks, split.chunks, micro),
        "ranks": ranks,
    }


def _layers(stage: Stage, stack: str) -> str:
    """Return the numbers of the layers of a stage, like `encoder 0-5`."""
    numbers = f"{stage.layers.start}-{stage.layers.stop - 1}" if len(stage.layers) > 1 else f"{stage.layers.start}"
    return f"{stack} {numbers if stage.layers else 'none'}".strip()
