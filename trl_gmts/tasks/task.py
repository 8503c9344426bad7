"""A task by name: how a row becomes a prompt, and what an answer is worth."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .code import CodeReward, code_row
from .commonsense import commonsense_reward, commonsense_row
from .math import MathReward, math_row
from .rows import Row


class Task(NamedTuple):
    """One of the paper's three domains."""

    name: str
    example: Callable[[Row], dict[str, Any]]
    """A row of a data set to a row of training: `prompt`, and the columns that `reward` reads."""
    reward: Callable[..., list[float | None]]
    """For TRL's `reward_funcs`."""


EXAMPLES: dict[str, Callable[[Row], dict[str, Any]]] = {
    "math": math_row,
    "commonsense": commonsense_row,
    "code": code_row,
}


def get_task(name: str | None, **options: Any) -> Task:
    """
    Args:
        name (`str`): "math", "commonsense" or "code".
        options: for `MathReward` or `CodeReward`.

    Returns:
        `Task`. Nothing is started or looked for before its reward is first called.
    """
    if name not in EXAMPLES:
        raise ValueError(
            f"there is no task {name!r}: name one of {', '.join(EXAMPLES)}, or map rows and reward answers yourself"
        )
    if name == "commonsense" and options:
        raise ValueError(f"the commonsense reward has no options, but was given {', '.join(options)}")
    rewards: dict[str, Callable[..., Any]] = {"math": MathReward, "code": CodeReward}
    return Task(name, EXAMPLES[name], rewards[name](**options) if name in rewards else commonsense_reward)
