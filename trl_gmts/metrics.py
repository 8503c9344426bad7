"""Numbers that describe a selection.

Each process turns its tokens into sums; the sums of all processes are added; ratios are taken last. So a logged number
does not depend on how the optimizer step is cut. Left to others: adding the sums up and logging (`trainer.py`).
"""

import torch


SUMS = (
    "tokens",
    "kept",
    "zero",
    "nonfinite",
    "entropy_kept",
    "entropy_dropped",
    "dropped",
    "kept_positive",
    "kept_by_entropy",
    "answers",
    "answers_with_kept",
    "kept_squared",
)


def selection_sums(
    kept: torch.Tensor,
    mask: torch.Tensor,
    scores: torch.Tensor,
    entropies: torch.Tensor,
    advantages: torch.Tensor,
    kept_by_entropy: torch.Tensor,
) -> torch.Tensor:
    """
    This process's sums, in the order of `SUMS`; add them over processes before `selection_metrics`.

    Args:
        kept, mask (`torch.Tensor` of shape `(R, T)`): bool, tokens trained on, and tokens that could be.
        scores, entropies (`torch.Tensor` of shape `(R, T)`): what ranked the tokens; nats.
        advantages (`torch.Tensor` of shape `(R, 1)` or `(R, T)`).
        kept_by_entropy (`torch.Tensor` of shape `(R, T)`): bool, tokens that entropy selection would keep.

    Returns:
        `torch.Tensor` of shape `(len(SUMS),)`, float64 (float32 on MPS, which has no other).
    """
    dtype = torch.float32 if kept.device.type == "mps" else torch.float64  # float32 counts to 2^24 only
    kept_per_answer = kept.sum(dim=1)
    dropped = mask & ~kept & torch.isfinite(entropies)
    sums = {
        "tokens": mask.sum(),
        "kept": kept.sum(),
        "zero": (mask & (scores == 0)).sum(),
        "nonfinite": (mask & ~torch.isfinite(scores)).sum(),
        "entropy_kept": entropies[kept].to(dtype).sum(),
        "entropy_dropped": entropies[dropped].to(dtype).sum(),
        "dropped": dropped.sum(),
        "kept_positive": (kept & (advantages > 0)).sum(),
        "kept_by_entropy": (kept & kept_by_entropy).sum(),
        "answers": torch.tensor(kept.size(0), device=kept.device),
        "answers_with_kept": (kept_per_answer > 0).sum(),
        "kept_squared": kept_per_answer.to(dtype).square().sum(),
    }
    return torch.stack([sums[name].to(dtype) for name in SUMS])


def selection_metrics(sums: torch.Tensor) -> dict[str, float]:
    """
    The logged numbers, from the sums of all processes. A mean over no token is left out rather than made up.

    Args:
        sums (`torch.Tensor` of shape `(len(SUMS),)`).

    Returns:
        `dict[str, float]`: see [`GMTSGRPOTrainer`] for what each means.
    """
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    metrics = {"kept_tokens": total["kept"], "nonfinite_scores": total["nonfinite"]}

    def add(name: str, numerator: float, denominator: float) -> None:
        if denominator > 0:
            metrics[name] = numerator / denominator

    add("kept_fraction", total["kept"], total["tokens"])
    add("zero_score_fraction", total["zero"], total["tokens"])
    add("entropy_kept", total["entropy_kept"], total["kept"])
    add("entropy_dropped", total["entropy_dropped"], total["dropped"])
    add("kept_positive_advantage", total["kept_positive"], total["kept"])
    add("answers_with_kept", total["answers_with_kept"], total["answers"])
    add("effective_answers", total["kept"] ** 2, total["kept_squared"])
    add("entropy_overlap", total["kept_by_entropy"], total["kept"])
    return metrics
