"""Reading rows of datasets whose columns differ from copy to copy."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


Row = Mapping[str, Any]
Prompt = list[dict[str, str]]
"""A conversation, as TRL expects it: one message of the user."""


def prompt_of(text: str) -> Prompt:
    return [{"role": "user", "content": text}]


def first(row: Row, names: Iterable[str]) -> Any:
    """
    The first value of the row under one of these names, whatever their case; a dot goes into a nested record. None if there
    is none, or only empty ones.
    """
    for name in names:
        value: Any = row
        for part in name.split("."):
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
                value = value[0]
            lowered = {str(key).lower(): v for key, v in value.items()} if isinstance(value, Mapping) else {}
            value = lowered.get(part)
        if value is not None and value != "" and value != []:
            return value
    return None


def question_of(row: Row, names: Iterable[str]) -> str | None:
    """The question as text. A conversation stands for its last message of the user."""
    value = first(row, names)
    if isinstance(value, (list, tuple)):
        said = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
        value = said[-1] if said else None
    return value.strip() if isinstance(value, str) and value.strip() else None


def refuse(row: Row, domain: str, needs: str) -> NoReturn:
    raise ValueError(
        f"a row of a {domain} dataset is not understood: it needs {needs}, and has {shown(row)}. Rename its columns, or map "
        "the dataset to the columns named in docs/tasks.md yourself"
    )


def shown(row: Row) -> str:
    return "{" + ", ".join(f"{key}: {str(value)[:40]!r}" for key, value in row.items()) + "}"
