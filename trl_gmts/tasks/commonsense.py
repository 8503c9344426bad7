r"""Common sense: the letter or the words in the last `\boxed{}` against the key.

CommonsenseQA asks for one of five choices, CommonsenseQA 2.0 for yes or no.
"""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from .answers import last_boxed, text_of
from .rows import Prompt, Row, first, prompt_of, question_of, refuse


LETTERS = string.ascii_uppercase
QUESTION = ("question.stem", "question", "problem", "prompt")
ANSWER = ("answerkey", "answer", "label", "ground_truth", "reward_model.ground_truth")
YES, NO = {"yes", "true", "correct", "1"}, {"no", "false", "incorrect", "0"}

LATEX_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|texttt|textrm|textsf|emph|underline|boldsymbol|bm|mathrm|mathbf|mathsf|mathit|operatorname|boxed)"
    r"\s*\{([^{}]*)\}"
)
LEAD_IN = r"(?:(?:the )?(?:final )?(?:correct )?(?:answer|option|choice)(?: is)?[ :]*)?"
LETTER_FIRST = re.compile(LEAD_IN + r"[(\[]?([a-z])[)\]]?(?:[ .:,)\]=\u2013\u2014-]+(.*))?")
YES_OR_NO = re.compile(LEAD_IN + r"(\w+)(?:[,;:.!] .*)?")


def commonsense_prompt(question: str, choices: Sequence[str] = ()) -> Prompt:
    """The question, its choices under letters if it has any, and how to answer."""
    if choices:
        listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        ask = "Reason step by step, and put the letter of your final answer in \\boxed{}."
        return prompt_of(f"{question}\n\n{listed}\n\n{ask}")
    return prompt_of(f"{question}\n\nReason step by step, and put your final answer, yes or no, in \\boxed{{}}.")


def commonsense_row(row: Row) -> dict[str, Any]:
    """
    One question with its key, from a row of CommonsenseQA (choices and a letter) or CommonsenseQA 2.0 (yes or no).

    Returns:
        `prompt`, `answer` (a letter, "yes" or "no") and `choices` (texts, none for yes or no): what `commonsense_reward` reads.
    """
    question = question_of(row, QUESTION)
    labels, choices = choices_of(first(row, ("question.choices", "choices", "options")))
    key = first(row, ANSWER)
    needs = "a question, choices with an answerKey or an answer of yes or no"
    if question is None:
        refuse(row, "commonsense", needs)
    if key is None:
        refuse(row, "commonsense", needs + " (test splits come without keys: use the validation split)")
    if not choices:
        word = str(key).strip().lower()
        if word not in YES | NO:
            refuse(row, "commonsense", needs)
        return {"prompt": commonsense_prompt(question), "answer": "yes" if word in YES else "no", "choices": []}
    if len(choices) > len(LETTERS):
        refuse(row, "commonsense", f"at most {len(LETTERS)} choices")
    known = [label.upper() for label in labels]
    label = str(key).strip().upper()
    if label in known:
        index = known.index(label)
    elif isinstance(key, int) and 0 <= key < len(choices):
        index = key
    elif str(key).strip() in choices:
        index = choices.index(str(key).strip())
    else:
        refuse(row, "commonsense", f"a key that is one of its choices ({', '.join(labels)})")
    return {"prompt": commonsense_prompt(question, choices), "answer": LETTERS[index], "choices": choices}


def choices_of(value: Any) -> tuple[list[str], list[str]]:
    """Labels and texts: from two lists, a list of records, a record of texts by label, or a list of texts."""
    if isinstance(value, Mapping) and "text" in value:
        texts = [str(t) for t in value["text"]]
        return [str(x) for x in value.get("label", LETTERS[: len(texts)])], texts
    if isinstance(value, Mapping):
        return [str(k) for k in value], [str(v) for v in value.values()]
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
        return [str(v.get("label", LETTERS[i : i + 1])) for i, v in enumerate(value)], [
            str(v.get("text")) for v in value
        ]
    texts = [str(v) for v in value] if isinstance(value, (list, tuple)) else []
    return list(LETTERS[: len(texts)]), texts


def commonsense_reward(
    completions: Sequence[Any], answer: Sequence[Any], choices: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""
    1 where the last `\boxed{}` names the key, 0 otherwise, None (TRL leaves the row out) where there is no key.

    Args:
        completions: strings or conversations.
        answer: letters, or yes and no.
        choices: for each row the texts of its choices, empty or None for yes or no.
    """
    options: Sequence[Any] = [None] * len(answer) if choices is None else choices
    return [
        None if key is None else float(names_key(last_boxed(text_of(completion)), str(key), list(texts or ())))
        for completion, key, texts in zip(completions, answer, options, strict=True)
    ]


def names_key(box: str | None, key: str, choices: Sequence[str]) -> bool:
    """Whether the box holds the key's letter, its words, or both, in one of the usual spellings."""
    said = plain(box or "")[:500]
    key = key.strip().lower()
    if not said:
        return False
    if not choices:
        if key not in YES | NO:
            return said == key
        match = YES_OR_NO.fullmatch(said)
        words = set(re.findall(r"\w+", said))
        return match is not None and match.group(1) in (YES if key in YES else NO) and not (YES & words and NO & words)
    texts = [without_article(plain("" if choice is None else str(choice))) for choice in choices[: len(LETTERS)]]
    if without_article(said) in texts:
        return letter(texts.index(without_article(said))) == key
    match = LETTER_FIRST.fullmatch(said)
    if match is None or match.group(1) != key:
        return False
    # A letter with words after it: they must be that choice's.
    rest = without_article((match.group(2) or "").strip(" ()[]"))
    index = LETTERS.lower().index(key)  # the key is a letter: it matched one
    return not rest or (index < len(texts) and rest == texts[index])


def letter(index: int) -> str:
    return LETTERS[index].lower()


def plain(text: str) -> str:
    """Lower case, without LaTeX wrappers, quotes, and punctuation at the ends."""
    text = "".join(c for c in unicodedata.normalize("NFKC", text[:10_000]) if unicodedata.category(c) != "Cf")
    text = text.replace("\\ ", " ").replace("\\,", " ").replace("~", " ").replace("$", "")
    for _ in range(4):  # nested wrappers
        text = LATEX_WRAPPER.sub(r"\1", text)
    text = re.sub(r"[*_`\"'\u201c\u201d\u2018\u2019{}]|\\[()\[\].:,]", "", text)
    return " ".join(text.lower().split()).strip(" .,;:!")


def without_article(text: str) -> str:
    return re.sub(r"^(?:a|an|the) (?=\w)", "", text)
