"""The paper's three domains: how a data set's rows become prompts, and what rewards an answer.

`get_task("math")` has both. `MathReward`, `commonsense_reward` and `CodeReward` are reward functions for `GRPOTrainer` and
`GMTSGRPOTrainer`; `math_row`, `commonsense_row` and `code_row` map rows. What is in which data set: docs/tasks.md.
"""

from .code import CodeReward, code_prompt, code_row, passes
from .commonsense import commonsense_prompt, commonsense_reward, commonsense_row
from .math import MathReward, math_prompt, math_row
from .sandbox import Limits, Sandbox, SandboxError
from .task import Task, get_task


__all__ = [
    "CodeReward",
    "Limits",
    "MathReward",
    "Sandbox",
    "SandboxError",
    "Task",
    "code_prompt",
    "code_row",
    "commonsense_prompt",
    "commonsense_reward",
    "commonsense_row",
    "get_task",
    "math_prompt",
    "math_row",
    "passes",
]
