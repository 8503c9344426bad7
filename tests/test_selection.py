"""Exact thresholds, without TRL or a model: against sorting, in one process and spread over several."""

import math
import threading
from fractions import Fraction

import pytest
import torch

from trl_gmts.scores import entropy_scores, gmts_scores, random_scores
from trl_gmts.selection import ceil_fraction, select_tokens


class Processes:
    """Sums over threads that stand for processes: each call waits for all of them."""

    def __init__(self, number: int):
        self.barrier = threading.Barrier(number, timeout=30)
        self.parts: dict[int, torch.Tensor] = {}
        self.shapes: set[tuple] = set()

    def sum_for(self, rank: int):
        def add(tensor: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = tensor
            self.barrier.wait()
            self.shapes.add(tuple(tensor.shape))
            total = sum(self.parts.values())
            self.barrier.wait()
            return total

        return add


def identity(tensor):
    return tensor


def sorted_selection(scores, mask, segments, num_segments, ratio: str, *, scored_only, bottom):
    """What `select_tokens` has to find, by sorting."""
    kept = torch.zeros_like(mask)
    taus, denominator = [], 0
    for segment in range(num_segments):
        inside = mask & (segments == segment)
        finite = inside & scores.isfinite()
        if scored_only:
            finite = finite & (scores > 0)
            k = math.ceil(Fraction(ratio) * int(finite.sum()))
        else:
            k = math.ceil(Fraction(ratio) * int(inside.sum()))
        values = torch.sort(scores[finite], descending=not bottom).values
        if len(values) == 0:
            taus.append(math.nan)
            denominator += k
            continue
        tau = values[min(k, len(values)) - 1]
        chosen = finite & ((scores <= tau) if bottom else (scores >= tau))
        if not bottom and Fraction(ratio) < 1:
            chosen = chosen & (scores > 0)
        kept |= chosen
        taus.append(tau.item())
        denominator += max(int(chosen.sum()), k)
    return kept, torch.tensor(taus), denominator


def assert_exact(scores, mask, segments, num_segments, ratio, scored_only, bottom):
    options = {"scored_only": scored_only, "bottom": bottom}
    found = select_tokens(scores, mask, segments, num_segments, float(ratio), **options, sum_over_processes=identity)
    kept, taus, denominator = sorted_selection(scores, mask, segments, num_segments, ratio, **options)
    assert torch.equal(found.kept, kept)
    torch.testing.assert_close(found.thresholds, taus, rtol=0, atol=0, equal_nan=True)
    assert found.denominator == denominator
    return found


def scores_of(kind: str, shape, generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator)
    if kind == "distinct":
        return uniform
    if kind == "ties":
        return (uniform * 5).floor()
    if kind == "mostly zero":
        return torch.where(uniform < 0.85, 0.0, uniform)
    if kind == "all zero":
        return torch.zeros(shape)
    if kind == "all equal":
        return torch.full(shape, 0.7)
    if kind == "neighbours":  # one unit in the last place apart
        base = torch.full(shape, 1.0).view(torch.int32)
        return (base + (uniform * 6).int()).view(torch.float32)
    if kind == "denormal":
        return (uniform * 1000).int().view(torch.float32)
    if kind == "all magnitudes":
        return torch.exp((uniform - 0.5) * 170)
    if kind == "not all numbers":
        spoiled = torch.where(uniform < 0.2, math.nan, uniform)
        return torch.where(uniform > 0.9, math.inf, spoiled)
    assert kind == "negative zero"
    return torch.where(uniform < 0.5, -0.0, uniform)


KINDS = ["distinct", "ties", "mostly zero", "all zero", "all equal", "neighbours", "denormal", "all magnitudes"]
KINDS += ["not all numbers", "negative zero"]


@pytest.mark.parametrize("bottom", [False, True])
@pytest.mark.parametrize("scored_only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_threshold_is_exact(kind, scored_only, bottom):
    generator = torch.Generator().manual_seed(0)
    for num_segments in (1, 7):
        for ratio in ("0.01", "0.05", "0.2", "0.5", "0.9", "1"):
            scores = scores_of(kind, (24, 31), generator)
            mask = torch.rand(24, 31, generator=generator) < 0.7
            segments = torch.randint(num_segments, (24, 1), generator=generator).expand(24, 31)
            assert_exact(scores, mask, segments, num_segments, ratio, scored_only, bottom)


@pytest.mark.parametrize("bottom", [False, True])
def test_many_segments_some_of_them_empty(bottom):
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(64, 20, generator=generator)
    segments = (torch.arange(64) * 3)[:, None].expand(64, 20)  # two of three segment numbers do not occur
    mask = torch.rand(64, 20, generator=generator) < 0.5
    mask[10] = mask[20] = False
    found = assert_exact(scores, mask, segments, 192, "0.3", False, bottom)
    assert found.thresholds.isnan().sum() == 192 - 62


def test_what_the_loss_divides_by_is_counted_segment_by_segment():
    """Eq. 2's max(kept, budget) of each: ties beyond one segment's budget do not make up for zeros in another."""
    scores = torch.tensor([[1.0] * 6, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])  # keeps 6 with a budget of 3, and 1
    segments = torch.tensor([[0], [1]]).expand(2, 6)
    found = select_tokens(
        scores, torch.ones_like(segments, dtype=torch.bool), segments, 2, 0.5,
        scored_only=False, bottom=False, sum_over_processes=identity,
    )  # fmt: skip
    assert found.kept.sum(1).tolist() == [6, 1] and found.budgets.tolist() == [3, 3]
    assert found.denominator == 6 + 3


def test_no_token_at_all():
    nothing = torch.zeros(4, 6, dtype=torch.bool)
    found = assert_exact(torch.rand(4, 6), nothing, torch.zeros(4, 6, dtype=torch.int64), 1, "0.2", False, False)
    assert not found.kept.any() and found.denominator == 0


def test_padding_is_never_kept_whatever_its_score():
    scores = torch.tensor([[1.0, 2.0, 100.0, math.inf]])
    mask = torch.tensor([[True, True, False, False]])
    found = assert_exact(scores, mask, torch.zeros(1, 4, dtype=torch.int64), 1, "1", False, False)
    assert found.kept.tolist() == [[True, True, False, False]]


def test_nonfinite_scores_count_but_are_never_kept():
    scores = torch.tensor([[math.nan, math.inf, 3.0, 2.0, 1.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    segments = torch.zeros(1, 5, dtype=torch.int64)
    found = assert_exact(scores, mask, segments, 1, "0.4", False, False)
    assert found.kept.tolist() == [[False, False, True, True, False]]
    assert found.denominator == 2
    found = assert_exact(scores, mask, segments, 1, "0.8", False, False)
    assert found.kept.sum() == 3 and found.denominator == 4


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("kind", ["distinct", "ties", "mostly zero", "not all numbers"])
def test_processes_find_what_one_process_finds(kind, number):
    """Rows dealt over processes, unevenly and one of them with nothing: the same tokens, on counts alone."""
    generator = torch.Generator().manual_seed(2)
    scores = scores_of(kind, (12, 17), generator)
    mask = torch.rand(12, 17, generator=generator) < 0.8
    segments = torch.randint(3, (12, 1), generator=generator).expand(12, 17)
    alone = assert_exact(scores, mask, segments, 3, "0.25", False, False)
    sizes = [12, 0] if number == 2 else [7, 1, 4]
    processes, results, errors = Processes(number), {}, []

    def work(rank: int, rows: slice):
        try:
            results[rank] = select_tokens(
                scores[rows],
                mask[rows],
                segments[rows],
                3,
                0.25,
                scored_only=False,
                bottom=False,
                sum_over_processes=processes.sum_for(rank),
            )
        except Exception as error:  # a broken barrier ends the others
            errors.append(error)
            processes.barrier.abort()

    starts = [sum(sizes[:rank]) for rank in range(number)]
    threads = [
        threading.Thread(target=work, args=(rank, slice(starts[rank], starts[rank] + sizes[rank])))
        for rank in range(number)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(torch.cat([results[rank].kept for rank in range(number)]), alone.kept)
    for result in results.values():
        torch.testing.assert_close(result.thresholds, alone.thresholds, rtol=0, atol=0, equal_nan=True)
        assert result.denominator == alone.denominator
    # What travels depends on the number of segments and not on the number of tokens
    assert max(math.prod(shape) for shape in processes.shapes) <= 3 * 256


@pytest.mark.parametrize(
    ("ratio", "count", "expected"),
    [
        (0.2, 0, 0),
        (0.2, 1, 1),
        (0.2, 5, 1),
        (0.2, 6, 2),
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001
        (0.29, 100, 29),  # and 0.29 * 100 is 28.999999999999996
        (0.1, 30, 3),
        (0.3, 10, 3),
        (0.7, 10, 7),
        (1.0, 12345, 12345),
        (1e-6, 3, 1),
        (0.2, 10_000_001, 2_000_001),
    ],
)
def test_budget_is_the_exact_ceiling(ratio, count, expected):
    assert ceil_fraction(ratio, torch.tensor([count])).tolist() == [expected]


def test_a_third_is_a_third():
    assert ceil_fraction(1 / 3, torch.tensor([3, 30, 300])).tolist() == [1, 10, 100]


def test_gmts_score_is_the_absolute_product():
    entropy, omega = torch.tensor([2.0, 0.5, 0.0, 1.0]), torch.tensor([-3.0, 4.0, 5.0, 0.0])
    assert gmts_scores(entropy, omega).tolist() == [6.0, 2.0, 0.0, 0.0]
    assert entropy_scores(torch.tensor([1.5, -1e-7])).tolist() == [1.5, 0.0]
    assert gmts_scores(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.inf])).isfinite().sum() == 0


def test_random_scores_belong_to_the_answer_and_the_step():
    """A function of seed, step, answer and position; of the order and the company of answers it is not."""
    answers = torch.tensor([3, 1, 12])
    together = random_scores(answers, 9, seed=5, step=2)
    assert torch.equal(random_scores(answers.flip(0), 9, seed=5, step=2), together.flip(0))
    assert torch.equal(random_scores(answers[:1], 4, seed=5, step=2), together[:1, :4])
    assert not torch.equal(random_scores(answers, 9, seed=6, step=2), together)
    assert not torch.equal(random_scores(answers, 9, seed=5, step=3), together)
    many = random_scores(torch.arange(400), 100, seed=0, step=0)
    assert 0 < many.min() and many.max() <= 1
    assert abs(many.mean() - 0.5) < 5e-3 and abs(many.std() - 12**-0.5) < 5e-3
    assert many.unique().numel() > 0.99 * many.numel()
