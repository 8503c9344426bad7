"""What of TRL this package leans on, checked when a trainer is built.

A seam that is missing or has changed is an error that names the installed and the supported TRL, never a silent return
to plain GRPO. What cannot be seen before training (what TRL's loss calls, what it returns) is checked in `trainer.py`
where it happens, with the same error.
"""

import inspect
from importlib.metadata import version

from trl import GRPOTrainer


SUPPORTED_TRL = ">=1.12,<1.17"

_METHODS = {
    "__init__": ("model", "reward_funcs", "args"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_get_per_token_logps_and_entropies": ("model",),
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
}
_ATTRIBUTES = ("_buffered_inputs", "_step", "_metrics", "num_generations", "_pending_extra_logs")


class TRLSeamError(RuntimeError):
    """TRL does not behave as this package expects of it: the selection would be wrong, so nothing is trained."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} The installed TRL is {version('trl')}; trl-gmts supports trl{SUPPORTED_TRL}. Install a supported "
            "version, or upgrade trl-gmts. To train without selection meanwhile, use TRL's own GRPOTrainer."
        )


def check_methods() -> None:
    """Raise [`TRLSeamError`] unless `GRPOTrainer` has the methods that are overridden, with the parameters used."""
    for name, parameters in _METHODS.items():
        method = vars(GRPOTrainer).get(name)  # not getattr: transformers' Trainer has some of these too
        if method is None:
            raise TRLSeamError(f"GRPOTrainer has no method {name}.")
        found = tuple(inspect.signature(method).parameters)[1 : 1 + len(parameters)]
        if found != parameters:
            raise TRLSeamError(f"GRPOTrainer.{name} takes {found} where {parameters} was expected.")


def check_attributes(trainer: GRPOTrainer) -> None:
    """Raise [`TRLSeamError`] unless the built trainer has the attributes that are read."""
    for name in _ATTRIBUTES:
        if not hasattr(trainer, name):
            raise TRLSeamError(f"GRPOTrainer has no attribute {name}.")
