"""The fields that GMTS adds to TRL's `GRPOConfig`, their ranges, and what cannot be combined.

Left to others: everything about tensors (`scores.py`, `selection.py`) and about TRL's internals (`trainer.py`).
"""

import numbers
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Literal, get_args

from packaging.version import Version
from trl import GRPOConfig


TokenSelectionName = Literal["gmts", "entropy", "random", "none"]
SelectionScope = Literal["batch", "group", "sequence"]
SelectionBase = Literal["all", "scored"]


@dataclass
class GMTSGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`GMTSGRPOTrainer`]: TRL's `GRPOConfig` and the nine fields below.

    Every field of `GRPOConfig` keeps its meaning and its default, and all of them work with `TrlParser`, in YAML and
    on the command line.

    Parameters:
        token_selection (`str`, *optional*, defaults to `"gmts"`):
            Score that ranks the tokens. `"gmts"`: entropy times the coefficient that the loss gives to the token's
            log-probability (GMTS, arXiv 2608.30632). `"entropy"`: entropy alone (ETS, arXiv 2506.01939). `"random"`:
            uniform, seeded by `seed`, the same number of tokens. `"none"`: train on all tokens, exactly as
            `GRPOTrainer` does.
        selection_ratio (`float`, *optional*, defaults to `0.2`):
            Fraction of the tokens that is trained on, in (0, 1]: the paper's rho. At 1 the loss is TRL's.
        selection_scope (`str`, *optional*, defaults to `"batch"`):
            Where the threshold is taken. `"batch"`: one for the whole optimizer step, over all its micro-batches and
            all processes. `"group"`: one for each prompt's answers. `"sequence"`: one for each answer.
        selection_base (`str`, *optional*, defaults to `"all"`):
            What `selection_ratio` is a fraction of. `"all"`: all trainable completion tokens. `"scored"`: those with a
            nonzero score, as in the authors' verl code.
        select_bottom (`bool`, *optional*, defaults to `False`):
            Keep the tokens with the lowest scores instead of the highest: the paper's ablation. The lowest score is
            zero: with many groups without advantage, all tokens kept may be without gradient. `selection_base="scored"`
            leaves zeros out.
        normalize_selected (`bool`, *optional*, defaults to `True`):
            Average the loss over the kept tokens (the paper's Eq. 2). `False` keeps TRL's denominators, so that a
            smaller ratio also means a smaller gradient, as in the authors' code.

        skip_unselected (`bool`, *optional*, defaults to `True`):
            Leave what is not trained on out of the forward and backward passes as well: answers without a kept token,
            what follows an answer's last kept token, and padding. The gradient is the same (with dropout, another draw
            of it), the step is cheaper. Run whole all the same: models without rotary positions, prompt tuning, batches
            with images or an MoE load-balancing loss, batches beyond the original context length of a model with
            dynamic or LongRoPE scaling, and `selection_ratio=1`.

        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Before the update, replace prompts whose answers all score alike by fresh ones (DAPO, arXiv 2503.14476):
            random prompts of the training set, with new answers. Works with any `token_selection`, `"none"` included.
        max_resample_rounds (`int`, *optional*, defaults to `10`):
            How often fresh prompts are drawn for a generation batch with `dynamic_sampling`. What is still without a
            signal then is kept, with a warning, and adds no gradient.

    Raises:
        ValueError: if a value is outside its range, or if a combination would make the selection wrong. The message
            says what to change.
    """

    token_selection: TokenSelectionName = field(
        default="gmts",
        metadata={
            "help": "Score that ranks the tokens: 'gmts' (entropy times the loss's own coefficient of the token's "
            "log-probability), 'entropy' (entropy alone, ETS), 'random' (seeded, equal budget) or 'none' (train on "
            "all tokens, exactly as GRPOTrainer does)."
        },
    )
    selection_ratio: float = field(
        default=0.2,
        metadata={
            "help": "Fraction of the tokens that is trained on, in (0, 1]: the paper's rho. At 1 the loss is TRL's."
        },
    )
    selection_scope: SelectionScope = field(
        default="batch",
        metadata={
            "help": "Where the threshold is taken: 'batch' (the whole optimizer step, all micro-batches and "
            "processes), 'group' (each prompt's answers) or 'sequence' (each answer)."
        },
    )
    selection_base: SelectionBase = field(
        default="all",
        metadata={
            "help": "What selection_ratio is a fraction of: 'all' trainable completion tokens, or the 'scored' ones, "
            "those with a nonzero score."
        },
    )
    select_bottom: bool = field(
        default=False,
        metadata={"help": "Keep the tokens with the lowest scores instead of the highest (the paper's ablation)."},
    )
    normalize_selected: bool = field(
        default=True,
        metadata={
            "help": "Average the loss over the kept tokens (the paper's Eq. 2). False keeps TRL's denominators."
        },
    )

    skip_unselected: bool = field(
        default=True,
        metadata={
            "help": "Leave answers without a kept token, what follows an answer's last kept token, and padding out of "
            "the forward and backward passes. Same gradient, cheaper step."
        },
    )

    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Replace prompts whose answers all score alike by fresh ones before the update (DAPO's dynamic "
            "sampling)."
        },
    )
    max_resample_rounds: int = field(
        default=10,
        metadata={"help": "How often fresh prompts are drawn for a generation batch with dynamic_sampling."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_selection()

    def check_selection(self) -> None:
        """Raise `ValueError` if the selection's fields are out of range or cannot be combined with others."""
        _check_choice("token_selection", self.token_selection, TokenSelectionName)
        _check_choice("selection_scope", self.selection_scope, SelectionScope)
        _check_choice("selection_base", self.selection_base, SelectionBase)
        ratio: object = self.selection_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 < float(ratio) <= 1:
            raise ValueError(
                f"selection_ratio must be a number in (0, 1], got {self.selection_ratio!r}. The paper uses 0.2; to "
                "train on all tokens set token_selection='none'."
            )
        for name in ("select_bottom", "normalize_selected", "skip_unselected", "dynamic_sampling"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        rounds: object = self.max_resample_rounds
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ValueError(
                f"max_resample_rounds must be a whole number of at least 1, got {rounds!r}. To draw no fresh prompts set "
                "dynamic_sampling=False."
            )
        if self.token_selection == "none":
            if self.select_bottom:
                raise ValueError(
                    "select_bottom=True has nothing to select from with token_selection='none'. Set token_selection "
                    "to 'gmts', 'entropy' or 'random', or leave select_bottom at False."
                )
            return
        if self.top_entropy_quantile < 1.0:
            raise ValueError(
                f"top_entropy_quantile={self.top_entropy_quantile} (TRL's entropy mask) and token_selection="
                f"'{self.token_selection}' would both drop tokens. For entropy selection leave top_entropy_quantile at "
                "1.0 and set token_selection='entropy'; for TRL's own mask set token_selection='none'."
            )
        if self.steps_per_generation % self.gradient_accumulation_steps != 0:
            raise ValueError(
                f"steps_per_generation ({self.steps_per_generation}) must be a multiple of "
                f"gradient_accumulation_steps ({self.gradient_accumulation_steps}): the selection ranks the tokens of "
                "a whole optimizer step, so all its micro-batches must come from one generation batch. Leave "
                "steps_per_generation and generation_batch_size unset, or set steps_per_generation to a multiple."
            )
        if self.use_liger_kernel and Version(version("trl")) < Version("1.15"):
            raise ValueError(
                f"use_liger_kernel=True makes TRL {version('trl')} compute its loss inside a fused kernel, where "
                "tokens cannot be selected. Set use_liger_kernel=False, or install trl>=1.15, where the flag no "
                "longer touches the loss."
            )


def _check_choice(name: str, value: object, choices: object) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
