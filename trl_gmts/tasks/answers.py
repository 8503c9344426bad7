"""What an answer says: its text, its last box, its last Python block. Total on whatever a model or a trainer hands over."""

import re
from collections.abc import Mapping, Sequence
from typing import Any


BOX_OR_BRACE = re.compile(r"\\boxed\s{0,8}\{|\\.|[{}]", re.DOTALL)
FENCE = re.compile(r"^([ \t]{0,3})(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
PYTHON = re.compile(r"(?:python|py|ipython)[\d.]*")


def text_of(completion: Any) -> str:
    """
    The text of a completion: a string as it is, of a conversation the last message of the assistant.

    Args:
        completion: a string, a list of messages, or anything else, which counts as empty.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, Sequence) or isinstance(completion, bytes):
        return ""
    for message in reversed(completion):
        if isinstance(message, Mapping) and message.get("role", "assistant") == "assistant":
            content = message.get("content")
            if isinstance(content, str):
                return content
            if isinstance(content, Sequence):  # a list of parts, as multimodal templates have it
                parts = [part.get("text") for part in content if isinstance(part, Mapping)]
                return "".join(part for part in parts if isinstance(part, str))
            return ""
    return ""


def last_boxed(text: str) -> str | None:
    r"""
    The contents of the last `\boxed{...}` that is closed, the outer one where they are nested. None if there is none.

    One pass over the braces, so that a text of nothing but `\boxed{` costs no more than another.
    """
    opened: list[int | None] = []  # for each open brace, where the contents of its box start
    last = None
    for match in BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            opened.append(match.end() if len(token) > 1 else None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = text[start : match.start()]
    return last


def last_python_block(text: str) -> str | None:
    """
    The last closed Markdown code block marked as Python, or without one the last unmarked. None if there is neither.
    """
    marked = unmarked = None
    indent = fence = language = ""
    block: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):  # not splitlines: it cuts at what Python allows in a string
        match = FENCE.match(line)
        if not fence and match:
            indent, fence, language = match.group(1), match.group(2), match.group(3).lower()
            block = []
        elif fence and match and not match.group(3) and match.group(2).startswith(fence):
            if PYTHON.fullmatch(language):
                marked = "\n".join(block)
            elif not language:
                unmarked = "\n".join(block)
            fence = ""
        elif fence:
            block.append(line.removeprefix(indent))
    return unmarked if marked is None else marked
