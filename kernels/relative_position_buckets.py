"""Buckets of T5's relative position bias (arXiv 1910.10683), without torch."""

from __future__ import annotations

import math
from bisect import bisect_left


def relative_buckets(buckets: int, max_distance: int, *, bidirectional: bool) -> list[int]:
    """Return the bucket of each relative position from -R to R; all distances from R on share the last bucket.

    Half of the buckets of a direction hold one distance each, the others logarithmically growing ranges up to
    `max_distance`. The last bucket starts below that, at R: 91 bidirectional, 113 causal, for 32 buckets up to 128.

    Args:
        buckets: number of buckets of both directions together.
        max_distance: upper end of the logarithmic ranges; all distances from here on share the last bucket.
        bidirectional: later keys use the upper half of the buckets; otherwise they share bucket 0.
    """
    per_direction = buckets // 2 if bidirectional else buckets
    exact = per_direction // 2

    def bucket(distance: int) -> int:
        first = per_direction if bidirectional and distance > 0 else 0
        behind = abs(distance) if bidirectional else max(-distance, 0)
        if behind < exact:
            return first + behind
        share = math.log(behind / exact) / math.log(max_distance / exact)
        return first + min(per_direction - 1, exact + int(share * (per_direction - exact)))

    def is_last(distance: int) -> bool:
        return bucket(distance) == bucket(max_distance) and bucket(-distance) == bucket(-max_distance)

    reach = bisect_left(range(max_distance), True, key=is_last)
    return [bucket(distance) for distance in range(-reach, reach + 1)]
