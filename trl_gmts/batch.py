"""What the selection reads of a batch that TRL buffered, and how a token that cannot be scored is kept out of the loss.

A batch is the dict of tensors that `GRPOTrainer` makes after generation and rewards; B answers, P prompt and T completion
columns. Nothing here writes into one. Left to others: what the tensors are used for (`trainer.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from .seams import TRLSeamError


Batch = dict[str, Any]

# Read by TRL's loss, per answer or per token, with the value that makes a token neutral: ratio 1, KL 0, no advantage.
# TRL itself makes up for missing sampling log-probs (tokens that vLLM could not score), so they make no token unusable.
_NEUTRAL = {
    "old_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
    "advantages": 0.0,
}


def trainable_tokens(batch: Batch) -> torch.Tensor:
    """bool (B, T): completion tokens that the model wrote and that are not masked, the tokens that enter TRL's loss."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if batch.get("tool_mask") is not None else mask


def unusable_tokens(batch: Batch, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """
    Tokens of which something that TRL's loss reads is NaN or infinite.

    Args:
        batch (`dict`): as buffered by TRL.
        logps, entropies (`torch.Tensor` of shape `(B, T)`): of the current policy.

    Returns:
        `torch.Tensor`: bool (B, T).
    """
    unusable = ~(torch.isfinite(logps) & torch.isfinite(entropies))
    for name in _NEUTRAL:
        if batch.get(name) is not None:
            unusable = unusable | ~torch.isfinite(batch[name]).view(len(logps), -1)
    return unusable


def neutralized(
    batch: Batch, logps: torch.Tensor, entropies: torch.Tensor, unusable: torch.Tensor
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """
    Copies in which unusable tokens and padding have ratio 1 and KL 0, so that TRL's loss over them is finite.

    Padding is included because log-probs are not computed there, while the batch may hold some.

    Args:
        batch (`dict`), logps, entropies, unusable: see [`unusable_tokens`].

    Returns:
        `tuple`: the batch, the log-probs and the entropies.
    """
    clean = dict(batch)
    ignored = unusable | ~batch["completion_mask"].bool()
    for name, neutral in _NEUTRAL.items():
        tensor = batch.get(name)
        if tensor is None:
            continue
        if name.endswith("logps"):
            clean[name] = tensor.masked_fill(ignored, neutral)
        else:
            clean[name] = tensor.masked_fill(~torch.isfinite(tensor), neutral)
    if batch.get("sampling_per_token_logps") is not None:  # the engine's; NaN where unknown, which TRL allows for
        clean["sampling_per_token_logps"] = batch["sampling_per_token_logps"].masked_fill(ignored, 0.0)
    return clean, logps.masked_fill(ignored, 0.0), entropies.masked_fill(ignored, 0.0)


class Snapshot:
    """Tells whether a batch holds other tensors than it held, or something was written into them. Copies nothing."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._tensors = {name: (value, _version(value)) for name, value in batch.items() if torch.is_tensor(value)}

    def has_changed(self) -> bool:
        return any(
            self.batch.get(name, tensor) is not tensor or _version(tensor) != version
            for name, (tensor, version) in self._tensors.items()
        )


def _version(tensor: torch.Tensor) -> int:
    """Counts what was written into a tensor; PyTorch does not count for those made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def concatenated(window: Sequence[Batch], name: str) -> torch.Tensor:
    """The tensor `name` of all micro-batches, along the rows."""
    if any(batch.get(name) is None for batch in window):
        raise TRLSeamError(f"The batches that GRPOTrainer buffered have no {name!r}.")
    return torch.cat([batch[name] for batch in window])
