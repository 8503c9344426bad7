"""A request for log-probs, as TRL makes it, and the same request for a pack of its rows.

Left to others: what a pack is (`packing.py`), and running TRL's forward on a request (`trainer.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .packing import Pack
from .seams import TRLSeamError


@dataclass
class ForwardCall:
    """The arguments of `GRPOTrainer._get_per_token_logps_and_entropies`, without the model, and what a pack adds."""

    input_ids: torch.Tensor
    """int64 (B, L): prompts padded on the left, completions on the right."""
    attention_mask: torch.Tensor
    """integer (B, L)."""
    logits_to_keep: int
    """T, the number of completion columns at the end."""
    kwargs: dict[str, Any]
    position_ids: torch.Tensor | None = None
    """int64 (B, L); the model's own if None."""
    wanted: torch.Tensor | None = None
    """bool (B, L): the tokens whose log-probs are wanted; all completion tokens if None."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "ForwardCall":
        """The call that TRL made. Raises `TRLSeamError` if it was not made in the way of the supported versions."""
        if len(args) == 4:  # TRL 1.12 and 1.13, for old log-probs
            kwargs = {**kwargs, "batch_size": args[3]}
            args = args[:3]
        if len(args) != 3:
            raise TRLSeamError(
                f"_get_per_token_logps_and_entropies was called with {len(args)} positional arguments besides the model "
                "where (input_ids, attention_mask, logits_to_keep) was expected."
            )
        return cls(*args, kwargs)

    def is_plain(self) -> bool:
        """Whether it is about token ids alone: no images, no MoE loss, nothing that would have to be cut with the rows."""
        return all(
            value is None or value is False or name in ("compute_entropy", "batch_size")
            for name, value in self.kwargs.items()
        )

    def wants_more(self) -> bool:
        """Whether more than log-probs and entropies is asked for: the MoE load-balancing loss, for which TRL has a flag."""
        return any(value is True and name != "compute_entropy" for name, value in self.kwargs.items())

    def packed(self, pack: Pack, needed: torch.Tensor) -> "ForwardCall":
        """The call for a pack of the rows, with log-probs of the tokens in `needed` (bool (B, T)) only."""
        prompt = needed.new_zeros(len(needed), pack.prompt_width)
        return ForwardCall(
            input_ids=pack.gather(self.input_ids, padding=0),
            attention_mask=pack.gather(self.attention_mask, padding=0),
            logits_to_keep=pack.completion_width,
            kwargs={name: value for name, value in self.kwargs.items() if name != "batch_size"},
            position_ids=pack.columns.clamp(min=0),
            wanted=pack.gather(torch.cat([prompt, needed], dim=1), padding=0),
        )

    def through(self, model: torch.nn.Module) -> Callable[..., Any]:
        """What TRL's forward calls in place of the model: the model, told what the pack adds."""

        def run(**model_inputs: Any) -> Any:
            if self.position_ids is not None:
                model_inputs["position_ids"] = self.position_ids
            if self.wanted is not None and "labels" in model_inputs:
                # TRL's LM head leaves out what is labelled -100, where the device allows it (GPU, TRL >= 1.15).
                model_inputs["labels"] = model_inputs["labels"].masked_fill(~self.wanted, -100)
            return model(**model_inputs)

        return run


def concatenated_call(calls: Sequence[ForwardCall]) -> ForwardCall:
    """One call for the rows of plain calls about batches of the same width."""
    return replace(
        calls[0],
        input_ids=torch.cat([call.input_ids for call in calls]),
        attention_mask=torch.cat([call.attention_mask for call in calls]),
    )


def takes_packs(model: Any) -> bool:
    """
    Whether rows may be shifted and their padding left out, with the columns that the tokens had as position ids.

    They may where positions enter through rotary embeddings alone, counted from the first column. Composite
    (vision-language) models may count in a way of their own; other models count from the padding, or do without positions;
    and PEFT's prompt tuning, which puts tokens of its own in front, ignores position ids.
    """
    text_config = model.config.get_text_config()
    rotary = any(getattr(text_config, name, None) is not None for name in ("rope_parameters", "rope_theta"))
    learns_prompt = any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values())
    return rotary and text_config is model.config and not learns_prompt


def longest_with_fixed_positions(config: Any) -> float:
    """
    The width up to which a token's rotary embedding does not depend on how wide the batch is.

    With dynamic and LongRoPE scaling the frequencies follow the last position of the batch, padding included, once it is
    past the original context length. Infinite for other models.
    """
    text_config = config.get_text_config()
    scalings = [getattr(text_config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    scalings += [nested for scaling in scalings for nested in scaling.values() if isinstance(nested, dict)]
    limits = [math.inf]
    for scaling in scalings:
        kind = scaling.get("rope_type") or scaling.get("type") or ""
        if "dynamic" in kind or kind in ("longrope", "su"):
            for holder in (scaling, vars(text_config)):
                limits += [holder.get("original_max_position_embeddings") or math.inf]
            limits += [text_config.max_position_embeddings]
    return min(limits)
