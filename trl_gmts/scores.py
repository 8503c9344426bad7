"""Token scores: what ranks the tokens of an optimizer step.

Every function returns a non-negative float32 tensor; a higher score means a token that matters more. Left to others:
where the entropies and coefficients come from (`trainer.py`), and what is done with the ranking (`selection.py`).
"""

import numpy as np
import torch


def gmts_scores(entropies: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """
    The GMTS score |E * omega| (arXiv 2608.30632, Section 3): a proxy for the norm of the token's policy gradient.

    Args:
        entropies (`torch.Tensor`, any shape): entropy of the next-token distribution, in nats.
        coefficients (`torch.Tensor`, same shape): coefficient of the gradient of the token's log-probability.

    Returns:
        `torch.Tensor` of the same shape, float32. Non-finite where an input is.
    """
    return (entropy_scores(entropies) * coefficients.float()).abs()


def entropy_scores(entropies: torch.Tensor) -> torch.Tensor:
    """
    The ETS score (arXiv 2506.01939): the entropy itself, in nats. Rounding below zero counts as zero.

    Args:
        entropies (`torch.Tensor`, any shape).

    Returns:
        `torch.Tensor` of the same shape, float32.
    """
    return entropies.float().clamp(min=0.0)


def random_scores(answer_ids: torch.Tensor, width: int, seed: int, step: int) -> torch.Tensor:
    """
    Uniform scores in (0, 1], a function of (seed, optimizer step, answer, position) and of nothing else: the same
    tokens are drawn however the step is cut into micro-batches and over processes.

    Args:
        answer_ids (`torch.Tensor` of shape `(R,)`, integer): number of each answer within the global generation batch.
        width (`int`): number of positions T.
        seed (`int`): the run's seed.
        step (`int`): optimizer step.

    Returns:
        `torch.Tensor` of shape `(R, T)`, float32, on the device of `answer_ids`.
    """
    rows = [
        1.0 - np.random.default_rng((seed, step, answer)).random(width, dtype=np.float32)
        for answer in answer_ids.tolist()
    ]
    return torch.from_numpy(np.stack(rows)).to(answer_ids.device)
