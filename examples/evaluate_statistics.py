"""Accuracy from repeated answers to each problem, and how far it can be trusted. Numbers in, numbers out.

The problems are the sample: answers to one problem resemble each other, so 16 answers to each of 30 problems are far from
480 independent trials. All intervals below take the spread *between problems*, which contains the spread of the answers
within them. They say where accuracy would lie on other problems of this kind, not only on another run over the same ones.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance


LEVEL = 0.95


@dataclass
class Estimate:
    value: float
    low: float
    high: float


def accuracy(correct: list[list[bool]]) -> Estimate:
    """
    Mean over problems of the share of correct answers, with a 95 % Wilson interval for clustered answers.

    Wilson, because it stays within 0 and 1 and has a width where all answers are right or all are wrong; a mean plus or
    minus its standard error has neither, and 30 problems of an olympiad are often near 0. For the number of trials it is
    given the number of independent answers that would have the same standard error.

    Args:
        correct (`list[list[bool]]`): For each problem, whether each of its answers is right.
    """
    shares = [fmean(map(float, answers)) for answers in correct]
    num_problems, num_answers = len(correct), sum(map(len, correct))
    mean = fmean(shares)
    if num_problems < 2:  # the spread between problems is unknown
        return Estimate(mean, 0.0, 1.0)
    squared_error = variance(shares) / num_problems
    trials = min(mean * (1 - mean) / squared_error, num_answers) if squared_error > 0 else num_problems
    ratio = critical_value(num_problems - 1) ** 2 / trials
    center = (mean + ratio / 2) / (1 + ratio)
    half = math.sqrt(ratio * mean * (1 - mean) + ratio**2 / 4) / (1 + ratio)
    return Estimate(mean, max(center - half, 0.0), min(center + half, 1.0))


def mean_of_sets(sets: list[Estimate]) -> Estimate:
    """The plain mean over problem sets, as papers report it. The sets' errors are independent: their squares add up."""
    value = fmean(estimate.value for estimate in sets)
    below = math.hypot(*(estimate.value - estimate.low for estimate in sets)) / len(sets)
    above = math.hypot(*(estimate.high - estimate.value for estimate in sets)) / len(sets)
    return Estimate(value, value - below, value + above)


def difference(ours: list[list[bool]], theirs: list[list[bool]]) -> Estimate:
    """How much more accurate `ours` is on the same problems: paired, so that hard problems do not blur it."""
    gains = [fmean(map(float, a)) - fmean(map(float, b)) for a, b in zip(ours, theirs, strict=True)]
    mean = fmean(gains)
    if len(gains) < 2:
        return Estimate(mean, -1.0, 1.0)
    half = critical_value(len(gains) - 1) * math.sqrt(variance(gains) / len(gains))
    return Estimate(mean, max(mean - half, -1.0), min(mean + half, 1.0))


def pass_at_k(correct: list[list[bool]], k: int) -> float:
    """Mean over problems of the chance that one of k answers is right: 1 - C(n - c, k) / C(n, k), which is unbiased."""
    if any(len(answers) < k for answers in correct):
        raise ValueError(f"pass@{k} needs at least {k} answers to each problem.")
    return fmean(1 - math.comb(len(a) - sum(a), k) / math.comb(len(a), k) for a in correct)


def critical_value(degrees: int) -> float:
    """Two-sided quantile of Student's t, by its expansion around the normal (within 1 % from 5 degrees of freedom)."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
