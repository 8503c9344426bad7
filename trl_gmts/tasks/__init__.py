"""The paper's three domains: how a data set's rows become prompts, and what rewards an answer.

`load` gives a data set by name or from a local file; `MathReward`, `commonsense_reward` and `CodeReward` are reward functions
for `GRPOTrainer` and `GMTSGRPOTrainer`; `math_row`, `commonsense_row` and `code_row` map rows of data of one's own.
"""

from .catalogue import DOMAINS, SOURCES, Domain, Source, load
from .code import CodeReward, code_prompt, code_row, passes
from .commonsense import commonsense_prompt, commonsense_reward, commonsense_row
from .math import MathReward, math_prompt, math_row
from .sandbox import Limits, Sandbox, SandboxError


__all__ = [
    "DOMAINS",
    "SOURCES",
    "CodeReward",
    "Domain",
    "Limits",
    "MathReward",
    "Sandbox",
    "SandboxError",
    "Source",
    "code_prompt",
    "code_row",
    "commonsense_prompt",
    "commonsense_reward",
    "commonsense_row",
    "load",
    "math_prompt",
    "math_row",
    "passes",
]
