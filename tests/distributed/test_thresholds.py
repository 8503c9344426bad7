"""Exact thresholds over tokens that are spread over processes, and what travels to find them."""

import threading

import pytest
import torch

from distributed import large
from distributed.large import SEGMENTS, part, scores_and_segments, select
from trl_gmts.selection import kth_largest


class Crowd:
    """Processes played by threads: each brings a tensor, all get the sum."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought = [None] * size
        self.sizes = [[] for _ in range(size)]

    def sum_for(self, process: int):
        def sum_over_processes(tensor):
            self.sizes[process].append(tensor.numel())
            self.brought[process] = tensor
            self.barrier.wait()
            total = torch.stack(self.brought).sum(dim=0)
            self.barrier.wait()
            return total

        return sum_over_processes

    def run(self, function):
        """[function(process, its sum over processes)], all at the same time."""
        results, errors = [None] * self.size, []

        def one(process):
            try:
                results[process] = function(process, self.sum_for(process))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(process,)) for process in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def by_ranking(scores, segments, num_segments, ratio=large.RATIO, scored_only=False, bottom=False):
    """bool: what is to be kept; float: the threshold of each segment. With everything in one place."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    thresholds = torch.full((num_segments,), float("nan"))
    for segment in range(num_segments):
        here = segments == segment
        rankable = here & (scores > 0) if scored_only else here
        ranked = scores[rankable]
        if len(ranked) == 0:
            continue
        budget = -(-len(ranked) * round(ratio * 100) // 100)
        tau = ranked.kthvalue(budget if bottom else len(ranked) + 1 - budget).values
        thresholds[segment] = tau
        kept |= rankable & (scores <= tau if bottom else (scores >= tau) & (scores > 0))
    return kept, thresholds


def spread(processes: int, scores, segments, num_segments, **options):
    """`select` by as many processes, put together; and what travelled."""
    parts = [part(process, processes, len(scores)) for process in range(processes)]
    crowd = Crowd(processes)
    found = crowd.run(
        lambda process, total: select(scores[parts[process]], segments[parts[process]], num_segments, total, **options)
    )
    assert all(sizes == crowd.sizes[0] for sizes in crowd.sizes)
    return found, crowd.sizes[0]


OPTIONS = [
    {},
    {"bottom": True},
    {"scored_only": True},
    {"scored_only": True, "bottom": True},
    {"ratio": 0.01},
    {"ratio": 0.95},
]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("num_segments", [1, SEGMENTS])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_number_of_processes_keeps_what_ranking_in_one_place_keeps(processes, num_segments, options):
    scores, segments = scores_and_segments(4_001)
    scores = scores.round(decimals=1)  # ties
    segments = segments % num_segments
    kept, thresholds = by_ranking(scores, segments, num_segments, **options)
    found, _ = spread(processes, scores, segments, num_segments, **options)
    assert torch.equal(torch.cat([selected.kept for selected in found]), kept)
    for selected in found:
        assert torch.equal(selected.thresholds, thresholds)
        assert selected.denominator == found[0].denominator


@pytest.mark.parametrize("empty", [0, 1])
def test_a_process_without_tokens_takes_part(empty):
    scores, segments = scores_and_segments(1_000)
    kept, thresholds = by_ranking(scores, segments, SEGMENTS)
    mine = [slice(0, 0), slice(0, 1_000)] if empty == 0 else [slice(0, 1_000), slice(0, 0)]
    found = Crowd(2).run(
        lambda process, total: select(scores[mine[process]], segments[mine[process]], SEGMENTS, total)
    )
    assert torch.equal(found[1 - empty].kept, kept) and found[empty].kept.numel() == 0
    assert all(torch.equal(selected.thresholds, thresholds) for selected in found)


def test_what_travels_does_not_grow_with_the_tokens():
    """256 counts for each segment in each of four passes, and a few counts for each segment."""
    travelled = []
    for tokens in (100, 10_000, 1_000_000):
        scores, segments = scores_and_segments(tokens)
        travelled.append(spread(2, scores, segments, SEGMENTS)[1])
    assert travelled[0] == travelled[1] == travelled[2]
    assert sorted(travelled[0])[-4:] == [256 * SEGMENTS] * 4
    assert set(travelled[0]) == {SEGMENTS, 256 * SEGMENTS} and len(travelled[0]) <= 8


@pytest.mark.parametrize("bits", range(0, 31))
def test_scores_that_differ_in_one_bit_are_told_apart(bits):
    """The k-th largest of two scores whose bit patterns differ in one bit, wherever it is."""
    pair = torch.tensor([0x3F000000 ^ (1 << bits), 0x3F000000], dtype=torch.int32).view(torch.float32)
    if not torch.isfinite(pair).all():
        pair = torch.tensor([1 << bits, 0], dtype=torch.int32).view(torch.float32)
    for rank, expected in ((1, pair.max()), (2, pair.min())):
        found = Crowd(2).run(
            lambda process, total, rank=rank: kth_largest(
                pair[process : process + 1], torch.zeros(1, dtype=torch.int64), torch.tensor([rank]), total
            )
        )
        assert [float(value) for value in found] == [float(expected)] * 2


@pytest.fixture(scope="module")
def ranked_in_one_place():
    scores, segments = scores_and_segments()
    return {"batch": by_ranking(scores, segments * 0, 1), "group": by_ranking(scores, segments, SEGMENTS)}


def test_thresholds_are_exact_over_more_than_two_to_the_24_tokens(ranked_in_one_place):
    """`torch.quantile` refuses so many, and float32 cannot count them."""
    assert large.TOKENS > 2**24 and float(torch.tensor(float(2**24)) + 1) == 2**24
    scores, segments = scores_and_segments()
    for scope, num_segments in (("batch", 1), ("group", SEGMENTS)):
        selected = select(scores, segments % num_segments, num_segments, lambda tensor: tensor)
        kept, thresholds = ranked_in_one_place[scope]
        assert torch.equal(selected.kept, kept)
        assert torch.equal(selected.thresholds, thresholds)
        assert selected.denominator == max(int(kept.sum()), int(selected.budgets.sum()))


def test_two_real_processes_share_more_than_two_to_the_24_tokens(shared, ranked_in_one_place):
    for scope, num_segments in (("batch", 1), ("group", SEGMENTS)):
        found = [outcome["large"][scope] for outcome in shared("DDP")]
        kept, thresholds = ranked_in_one_place[scope]
        assert torch.equal(torch.cat([selected["kept"] for selected in found]), kept)
        for selected in found:
            assert torch.equal(selected["thresholds"], thresholds)
            assert selected["sizes"] == found[0]["sizes"] and max(selected["sizes"]) == 256 * num_segments
