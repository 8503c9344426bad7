"""Docstrings are written as TRL's are; this turns their notation into what the site generator reads.

name (`int`, *optional*, defaults to `3`):   ->   name (int):      the default is read from the code
[`Name`]                                     ->   a link, where the site documents the name
"""

import re

import griffe


DOCUMENTED = {
    "GMTSGRPOConfig": "trl_gmts.GMTSGRPOConfig",
    "GMTSGRPOTrainer": "trl_gmts.GMTSGRPOTrainer",
    "TokenSelection": "trl_gmts.TokenSelection",
}


class DocstringLinks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^(\s+[\w*, ]+) \((.*`.*)\):", plain_type, obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"\[`(\w+)`\](?![\[(])", link, text)


def plain_type(match: re.Match[str]) -> str:
    annotation = match[2].split(", *optional*")[0].replace("[`", "").replace("`]", "").replace("`", "")
    return f"{match[1]} ({annotation}):"


def link(match: re.Match[str]) -> str:
    name = match[1]
    return f"[`{name}`][{DOCUMENTED[name]}]" if name in DOCUMENTED else f"`{name}`"
