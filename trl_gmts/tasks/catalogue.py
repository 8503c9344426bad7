"""The paper's data sets by name: where the hub keeps them, and which domain reads their rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from .code import CodeReward, code_row
from .commonsense import commonsense_reward, commonsense_row
from .math import MathReward, math_row
from .rows import Row


class Domain(NamedTuple):
    """One of the paper's three domains."""

    row: Callable[[Row], dict[str, Any]]
    """A dataset's row to the columns that training needs."""
    reward: Callable[..., Callable[..., list[float | None]]]
    """Makes the reward function."""


class Source(NamedTuple):
    """A data set on the hub."""

    domain: str
    path: str
    split: str
    config: str | None = None
    keep: Callable[[Row], bool] | None = None
    """Rows to keep, where the set is a part of what the hub has."""


DOMAINS = {
    "math": Domain(math_row, MathReward),
    "commonsense": Domain(commonsense_row, lambda **options: commonsense_reward),
    "code": Domain(code_row, CodeReward),
}


def july_to_november_2024(row: Row) -> bool:
    return "2024-07-01" <= str(row["contest_date"])[:10] <= "2024-11-30"


SOURCES = {
    # training
    "math-12k": Source("math", "hiyouga/math12k", "train"),
    "dapo-math-17k": Source("math", "open-r1/DAPO-Math-17k-Processed", "train", "all"),
    "kodcode": Source("code", "KodCode/KodCode-V1", "train"),
    "commonsense-qa-train": Source("commonsense", "tau/commonsense_qa", "train"),
    # evaluation
    "aime-2024": Source("math", "HuggingFaceH4/aime_2024", "train"),
    "aime-2025": Source("math", "math-ai/aime25", "test"),
    "amc-23": Source("math", "math-ai/amc23", "test"),
    "math-500": Source("math", "HuggingFaceH4/MATH-500", "test"),
    "minerva": Source("math", "math-ai/minervamath", "test"),
    "olympiadbench": Source("math", "math-ai/olympiadbench", "test"),
    "humaneval": Source("code", "openai/openai_humaneval", "test"),
    "humaneval-plus": Source("code", "evalplus/humanevalplus", "test"),
    "mbpp": Source("code", "google-research-datasets/mbpp", "test", "sanitized"),
    "mbpp-plus": Source("code", "evalplus/mbppplus", "test"),
    "bigcodebench": Source("code", "bigcode/bigcodebench", "v0.1.4"),
    "bigcodebench-hard": Source("code", "bigcode/bigcodebench-hard", "v0.1.4"),
    "livecodebench": Source(
        "code", "livecodebench/code_generation_lite", "test", "release_v5", keep=july_to_november_2024
    ),
    # The test splits of both come without keys.
    "commonsense-qa": Source("commonsense", "tau/commonsense_qa", "validation"),
    "commonsense-qa-2": Source("commonsense", "tasksource/commonsense_qa_2.0", "validation"),
}


def load(
    name: str, *, path: str | Path | None = None, domain: str | None = None, limit: int | None = None
) -> datasets.Dataset:
    """
    A data set as training and evaluation need it: `prompt`, and the columns that its domain's reward reads.

    Args:
        name (`str`): one of `SOURCES`; or with `path` any name.
        path (`str` or `Path`, *optional*): a local copy instead of the hub: a JSON, JSON Lines, Parquet or CSV file.
        domain (`str`, *optional*): one of `DOMAINS`, needed where `name` is not one of `SOURCES`.
        limit (`int`, *optional*): the first rows only.
    """
    source = SOURCES.get(name)
    domain = domain or (source.domain if source else None)
    if domain not in DOMAINS or (source is None and path is None):
        raise ValueError(
            f"unknown data set {name!r} of domain {domain!r}. Name one of {', '.join(SOURCES)}; or give the path of a local "
            f"file and its domain, one of {', '.join(DOMAINS)}"
        )
    if path is not None:
        kinds = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
        kind = kinds.get(Path(path).suffix.lower())
        if kind is None:
            raise ValueError(f"{path} is not a file of a known kind: {', '.join(kinds)}")
        rows = datasets.load_dataset(kind, data_files=str(path), split="train")
    else:
        assert source is not None
        rows = datasets.load_dataset(source.path, source.config, split=source.split)
    if source is not None and source.keep is not None:
        rows = rows.filter(source.keep)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    return rows.map(DOMAINS[domain].row, remove_columns=rows.column_names)
