"""The buckets of T5's relative positions (arXiv 1910.10683). Pure: no torch, no device."""

from __future__ import annotations

import math
from bisect import bisect_left


def relative_buckets(buckets: int, max_distance: int, *, bidirectional: bool) -> list[int]:
    """The bucket of each distance from -R to R, the distance from which on all in its direction share theirs.

    Half of the buckets of a direction hold one distance each, the others ever more, up to `max_distance`. The last one
    begins before that, and with it R: at 91 both ways, at 113 causal, for 32 buckets up to 128.

    Args:
        buckets: of both directions together.
        max_distance: what the sizes of the buckets are made for; distances from here on are not told apart in any case.
        bidirectional: later keys have the upper half of the buckets; otherwise they share bucket 0.
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
