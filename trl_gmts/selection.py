"""Exact top-fraction selection over segments of tokens that may be spread over processes.

Pure functions on tensors. The only thing they know about other processes is `sum_over_processes`, a function that
returns the elementwise sum of an integer tensor over all of them (the identity for one process). No score ever leaves
its process: what travels is 256 counts per segment in each of four passes. Left to others: what the scores mean
(`scores.py`) and which token belongs to which segment (`trainer.py`).
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch


SumOverProcesses = Callable[[torch.Tensor], torch.Tensor]


class Selected(NamedTuple):
    """What `select_tokens` found. S is the number of segments; per-segment values are the same on every process."""

    kept: torch.Tensor
    """bool, shape of the scores: tokens to train on."""
    thresholds: torch.Tensor
    """float32 (S,): tau of each segment; NaN where a segment has no token to rank."""
    budgets: torch.Tensor
    """int64 (S,): ceil(ratio * tokens of the segment)."""
    denominator: int
    """S_rho of the paper's Eq. 2: the sum over segments of max(tokens kept, ceil(ratio * tokens))."""


def select_tokens(
    scores: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    ratio: float,
    *,
    scored_only: bool,
    bottom: bool,
    sum_over_processes: SumOverProcesses,
) -> Selected:
    """
    Keep the top `ratio` of the tokens of each segment, over all processes (the indicator in Eq. 2 of arXiv 2608.30632).

    The threshold is the exact ceil(ratio * N)-th largest score of the segment. Tokens that tie with it are all kept;
    tokens with a score of zero are not, unless `ratio` is 1 and every token is. Non-finite scores are never kept,
    though they count in N.

    Args:
        scores (`torch.Tensor` of any shape): float32, non-negative where finite.
        mask (`torch.Tensor`, same shape): bool, tokens that can be trained on.
        segments (`torch.Tensor`, same shape): int64, the segment of each token, in [0, num_segments).
        num_segments (`int`): number of segments, the same on every process.
        ratio (`float`): in (0, 1].
        scored_only (`bool`): N counts the tokens with a nonzero score instead of all of them.
        bottom (`bool`): keep the lowest scores instead of the highest: score <= the ceil(ratio * N)-th smallest.
        sum_over_processes: sums an int64 tensor over processes.

    Returns:
        [`Selected`]
    """
    rankable = mask & torch.isfinite(scores)
    if scored_only:
        rankable = rankable & (scores > 0)
    top_fraction = ceil_fraction(
        ratio, _count(rankable if scored_only else mask, segments, num_segments, sum_over_processes)
    )
    kept, thresholds = keep_extreme(
        scores, rankable, segments, top_fraction, bottom=bottom, sum_over_processes=sum_over_processes
    )
    if not bottom and ratio < 1:
        kept = kept & (scores > 0)
    num_kept = _count(kept, segments, num_segments, sum_over_processes)
    return Selected(kept, thresholds, top_fraction, int(torch.maximum(num_kept, top_fraction).sum()))


def keep_extreme(
    scores: torch.Tensor,
    rankable: torch.Tensor,
    segments: torch.Tensor,
    budgets: torch.Tensor,
    *,
    bottom: bool,
    sum_over_processes: SumOverProcesses,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The `budgets[s]` highest (or lowest) scores of each segment over all processes, and all that tie with the last.

    Args:
        scores (`torch.Tensor` of any shape): float32, finite and non-negative where rankable.
        rankable (`torch.Tensor`, same shape): bool, tokens that may be kept.
        segments (`torch.Tensor`, same shape): int64 in [0, S).
        budgets (`torch.Tensor` of shape `(S,)`): int64, the same on every process. A segment with fewer rankable tokens
            keeps all of them.
        bottom (`bool`): keep the lowest scores.
        sum_over_processes: sums an int64 tensor over processes.

    Returns:
        `tuple`: bool tensor of the shape of `scores`; float32 `(S,)`, the score of the last token that is kept, NaN
        where a segment has none.
    """
    num_rankable = _count(rankable, segments, len(budgets), sum_over_processes)
    rank = torch.minimum(budgets, num_rankable)
    if bottom:
        rank = num_rankable - rank + 1
    thresholds = kth_largest(scores[rankable], segments[rankable], rank, sum_over_processes)
    tau = thresholds[segments]
    return rankable & (scores <= tau if bottom else scores >= tau), thresholds


def _count(
    tokens: torch.Tensor, segments: torch.Tensor, num_segments: int, sum_over_processes: SumOverProcesses
) -> torch.Tensor:
    return sum_over_processes(torch.bincount(segments[tokens], minlength=num_segments))


def ceil_fraction(ratio: float, counts: torch.Tensor) -> torch.Tensor:
    """
    ceil(ratio * count) in integer arithmetic, so that 0.07 of 100 is 7 and not 8; at least 1 where a count is not 0.

    Args:
        ratio (`float`): in (0, 1]; taken as the simplest fraction with a denominator of at most a billion.
        counts (`torch.Tensor`): int64, non-negative.

    Returns:
        `torch.Tensor`: int64, same shape.
    """
    fraction = Fraction(float(ratio)).limit_denominator(10**9)
    exact = (counts * fraction.numerator + fraction.denominator - 1) // fraction.denominator
    return torch.maximum(exact, (counts > 0).to(exact.dtype))


def kth_largest(
    scores: torch.Tensor,
    segments: torch.Tensor,
    rank: torch.Tensor,
    sum_over_processes: SumOverProcesses,
) -> torch.Tensor:
    """
    The exact `rank`-th largest score of each segment over all processes, by radix selection.

    A non-negative float32 orders like its bit pattern, so four passes over its bytes, highest first, find the value:
    each pass counts, among the scores that share the bytes found so far, how many have each value of the next byte.

    Args:
        scores (`torch.Tensor` of shape `(n,)`): float32, finite, non-negative: this process's scores.
        segments (`torch.Tensor` of shape `(n,)`): int64 in [0, S).
        rank (`torch.Tensor` of shape `(S,)`): int64, from 1 to the number of scores of the segment over all processes.
        sum_over_processes: sums an int64 tensor over processes.

    Returns:
        `torch.Tensor` of shape `(S,)`, float32: the value; NaN where a segment has no score at all.
    """
    bits = scores.abs().view(torch.int32)  # abs: the bit pattern of -0.0 is not that of 0.0
    num_segments = len(rank)
    remaining = rank
    found = torch.zeros(num_segments, dtype=torch.int32, device=scores.device)
    empty = torch.zeros(num_segments, dtype=torch.bool, device=scores.device)
    for shift in (24, 16, 8, 0):
        byte = (bits >> shift) & 0xFF
        counts = torch.bincount(segments * 256 + byte, minlength=num_segments * 256)
        counts = sum_over_processes(counts).view(num_segments, 256)
        if shift == 24:
            empty = counts.sum(dim=1) == 0
        at_least = counts.flip(1).cumsum(1).flip(1)  # [s, b]: scores of segment s whose byte is b or higher
        digit = ((at_least >= remaining[:, None]).sum(dim=1) - 1).clamp(min=0)  # the highest b that reaches the rank
        remaining = remaining - (at_least - counts).gather(1, digit[:, None]).squeeze(1)
        found = found | (digit.to(torch.int32) << shift)
        same = byte == digit[segments]
        bits, segments = bits[same], segments[same]
    return found.view(torch.float32).masked_fill(empty, float("nan"))
