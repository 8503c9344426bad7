"""A plain GRPOTrainer that remembers what its own backward pass gave each log-prob and entropy, and what that implies.

For policies and inputs of any kind. Nothing of trl_gmts takes part.
"""

from functools import cache

import torch
from trl import GRPOTrainer

from harness import Run, Step
from oracle import ceil_of


@cache
def listening(trainer_class: type = GRPOTrainer) -> type:
    """`trainer_class`, of which `heard` has (logps, entropies, aux_loss) of every forward of a training step."""

    class Listening(trainer_class):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            forward = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if torch.is_grad_enabled() and self.model.training:
                for tensor in forward:
                    if tensor is not None and tensor.requires_grad:
                        tensor.retain_grad()
                self.__dict__.setdefault("heard", []).append(forward)
            return forward

    Listening.__name__ = trainer_class.__name__
    return Listening


def trainable(batch: dict) -> torch.Tensor:
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def selected_coefficients(found: Run, ratio: float = 0.2, step: int = 0, normalize: bool = True):
    """
    What the tokens of a plain run's optimizer step would be weighed with if the top `ratio` alone were trained on.

    Returns:
        lists with one (B, T) for each micro-batch: bool kept, weights of the log-probs, weights of the entropies.
    """
    batches = found.steps[step].micro_batches
    first = sum(len(s.micro_batches) for s in found.steps[:step])
    heard = found.trainer.heard[first : first + len(batches)]
    masks = [trainable(batch) for batch in batches]
    grads = [logps.grad for logps, _, _ in heard]
    entropies = [entropy.detach() for _, entropy, _ in heard]
    bonus = [torch.zeros_like(e) if e.grad is None else e.grad for _, e, _ in heard]
    delta = [(e * g).abs() for e, g in zip(entropies, grads, strict=True)]
    counted = torch.cat([d[m] for d, m in zip(delta, masks, strict=True)])
    budget = ceil_of(ratio, len(counted))
    ranked = counted.sort(descending=True).values
    tau = ranked[budget - 1]
    if tau > 0:
        assert ranked[budget] < tau * (1 - 1e-4), "the case is too close to a tie to be decided"
    kept = [(d >= tau) & (d > 0) & m for d, m in zip(delta, masks, strict=True)]
    number = sum(int(k.sum()) for k in kept)
    assert number > 0
    scale = len(counted) / max(number, budget) if normalize else 1.0
    logp_weights = [torch.where(k, g * scale, 0.0) for k, g in zip(kept, grads, strict=True)]
    entropy_weights = [torch.where(k, g * scale, 0.0) for k, g in zip(kept, bonus, strict=True)]
    return kept, logp_weights, entropy_weights


def weighted_gradient(model, step: Step, logp_weights, entropy_weights=None, temperature: float = 1.0):
    """
    Gradient of `sum of weight x log-prob + weight x entropy`, from the logits of a plain model, in float64.

    `model`: with the weights of the step. Its trainable parameters give the order of the gradient.
    """
    model.zero_grad()
    model.set_attn_implementation("sdpa")  # eager attention gives padding on the left no number
    total = 0.0
    for i, batch in enumerate(step.micro_batches):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        inputs = {
            name: batch[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids") if name in batch
        }
        width = batch["completion_ids"].size(1)
        logits = model(input_ids=ids, attention_mask=mask, **inputs).logits[:, -width - 1 : -1].double()
        log_p = torch.log_softmax(logits / temperature, dim=-1)
        logp = log_p.gather(2, batch["completion_ids"][:, :, None]).squeeze(2)
        total = total + torch.where(logp_weights[i] != 0, logp_weights[i] * logp, 0.0).sum()
        if entropy_weights is not None:
            entropy = -(log_p.exp() * log_p).sum(-1)
            total = total + torch.where(entropy_weights[i] != 0, entropy_weights[i] * entropy, 0.0).sum()
    total.backward()
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().double()
            for p in model.parameters()
            if p.requires_grad
        ]
    )
