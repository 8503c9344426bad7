"""Where the paper's evaluation sets are on the hub, and what the paper reports on them (arXiv 2608.30632)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    dataset: str
    split: str
    config: str | None = None
    months: tuple[str, str] | None = None
    """Only problems of contests from this month to that one."""


# For each task, in the paper's order. docs/tasks.md says what is known about each. The keys of CommonsenseQA's and
# CommonsenseQA 2.0's test splits are not public, so these are the validation splits. BigCodeBench needs the libraries that
# its problems use.
BENCHMARKS: dict[str, dict[str, Benchmark]] = {
    "math": {
        "aime-2024": Benchmark("HuggingFaceH4/aime_2024", "train"),
        "aime-2025": Benchmark("math-ai/aime25", "test"),
        "amc-23": Benchmark("math-ai/amc23", "test"),
        "math-500": Benchmark("HuggingFaceH4/MATH-500", "test"),
        "minerva": Benchmark("math-ai/minervamath", "test"),
        "olympiad-bench": Benchmark("math-ai/olympiadbench", "test"),
    },
    "commonsense": {
        "commonsense-qa": Benchmark("tau/commonsense_qa", "validation"),
        "commonsense-qa-2": Benchmark("tasksource/commonsense_qa_2.0", "validation"),
    },
    "code": {
        "live-code-bench": Benchmark("bzantium/livecodebench", "test", "release_v5", ("2024-07", "2024-11")),
        "humaneval": Benchmark("openai/openai_humaneval", "test"),
        "humaneval-plus": Benchmark("evalplus/humanevalplus", "test"),
        "mbpp": Benchmark("google-research-datasets/mbpp", "test", "full"),
        "mbpp-plus": Benchmark("evalplus/mbppplus", "test"),
        "big-code-bench": Benchmark("bigcode/bigcodebench", "v0.1.4"),
        "big-code-bench-hard": Benchmark("bigcode/bigcodebench-hard", "v0.1.4"),
    },
}

FIVE_MATH_SETS = ("aime-2024", "amc-23", "math-500", "minerva", "olympiad-bench")
SIX_MATH_SETS = ("aime-2024", "aime-2025", "amc-23", "math-500", "minerva", "olympiad-bench")
COMMONSENSE_SETS = ("commonsense-qa", "commonsense-qa-2")


@dataclass(frozen=True)
class PaperRow:
    """Mean accuracy over the row's sets, in percent."""

    name: str
    sets: tuple[str, ...] | None
    """None: which of the variants of a set enter the paper's mean is not stated."""
    base: float
    backbone: float
    ets: float
    gmts: float


PAPER: dict[str, list[PaperRow]] = {
    "math": [
        PaperRow("Qwen2.5-Math-1.5B, DAPO", FIVE_MATH_SETS, 13.03, 41.06, 40.01, 41.56),
        PaperRow("Qwen2.5-Math-1.5B, GRPO", FIVE_MATH_SETS, 13.03, 38.81, 39.59, 40.89),
        PaperRow("Qwen2.5-Math-7B, DAPO", FIVE_MATH_SETS, 15.97, 48.47, 48.81, 50.14),
        PaperRow("Qwen2.5-Math-7B, GRPO", FIVE_MATH_SETS, 15.97, 49.45, 46.43, 49.84),
        PaperRow("Qwen3-8B, DAPO", SIX_MATH_SETS, 25.44, 53.71, 54.23, 56.08),
    ],
    "commonsense": [
        PaperRow("Qwen2.5-1.5B, DAPO", COMMONSENSE_SETS, 7.20, 64.97, 65.46, 66.33),
        PaperRow("Qwen2.5-1.5B, GRPO", COMMONSENSE_SETS, 7.20, 64.25, 65.37, 66.04),
        PaperRow("Qwen2.5-7B, DAPO", COMMONSENSE_SETS, 23.21, 75.64, 74.77, 76.30),
        PaperRow("Qwen2.5-7B, GRPO", COMMONSENSE_SETS, 23.21, 73.20, 74.00, 75.26),
    ],
    "code": [
        PaperRow("Qwen2.5-Coder-1.5B, DAPO", None, 9.95, 45.74, 44.71, 46.58),
        PaperRow("Qwen2.5-Coder-1.5B, GRPO", None, 9.95, 45.62, 44.74, 46.64),
        PaperRow("Qwen2.5-Coder-7B, DAPO", None, 23.24, 55.20, 54.76, 55.50),
        PaperRow("Qwen2.5-Coder-7B, GRPO", None, 23.24, 54.31, 54.44, 55.13),
    ],
}
