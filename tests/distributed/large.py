"""More tokens than float32 or `torch.quantile` can count, spread over two real processes."""

from functools import cache

import torch

from trl_gmts.selection import select_tokens


TOKENS = 2**24 + 12_345
SEGMENTS = 7
RATIO = 0.2
SCOPES = ("batch", "group")


@cache
def scores_and_segments(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores over many orders of magnitude, a tenth of them zero; runs of tokens that belong together."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(tokens, generator=generator).mul_(8).exp_()
    scores[torch.rand(tokens, generator=generator) < 0.1] = 0.0
    return scores, torch.arange(tokens) * SEGMENTS // tokens


def part(process: int, processes: int, tokens: int = TOKENS) -> slice:
    """This process's tokens: unequal shares, and segments that straddle the border."""
    border = [0, *(tokens * (i + 1) * 5 // (processes * 5 + 1) for i in range(processes - 1)), tokens]
    return slice(border[process], border[process + 1])


def select(scores, segments, num_segments, sum_over_processes, **overrides):
    options = {"ratio": RATIO, "scored_only": False, "bottom": False} | overrides
    mask = torch.ones_like(scores, dtype=torch.bool)
    return select_tokens(scores, mask, segments, num_segments, sum_over_processes=sum_over_processes, **options)


def select_between_processes(accelerator) -> dict:
    """In each process: the selection from its part, and how many numbers every sum over processes had."""
    scores, segments = scores_and_segments()
    mine = part(accelerator.process_index, accelerator.num_processes)
    found = {}
    for scope in SCOPES:
        sizes = []

        def sum_over_processes(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return accelerator.reduce(tensor, reduction="sum")

        num_segments = SEGMENTS if scope == "group" else 1
        of = segments[mine] if scope == "group" else torch.zeros_like(segments[mine])
        selected = select(scores[mine], of, num_segments, sum_over_processes)
        found[scope] = {"sizes": sizes} | selected._asdict()
    return found
