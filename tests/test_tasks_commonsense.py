r"""Common sense: rows of both data sets, and the usual ways to write an answer."""

import pytest

from trl_gmts.tasks import commonsense_reward, commonsense_row


CHOICES = ["bank", "library", "the department store", "mall", "New York"]


@pytest.mark.parametrize(
    "said",
    [
        "A", "a", "(A)", "A.", "A)", "A:", "A,", r"\text{A}", r"\textbf{(A)}", r"\mathrm{A}", "$A$", " A ", "**A**",
        "bank", "Bank.", "a bank", "the bank", r"\text{bank}", '"bank"', "A bank", "A. bank", "(A) bank", "A: bank", "A) Bank",
        "Option A", "option A: bank", "The answer is A", "The correct answer is (A)", "answer: A", "choice A", r"A \text{ bank}", r"\(A\)",
        "[A]", "Final answer: A", "The final answer is (A)", r"\textrm{A}", r"\boldsymbol{A}", r"\underline{A}", r"\text{A} \text{bank}",
        "A – bank", "A = bank", "“A”", r"A\.", "Ａ", "A\u200b", "[A] bank",
    ],
)  # fmt: skip
def test_every_usual_spelling_of_the_key_counts(said):
    assert commonsense_reward([rf"I think \boxed{{{said}}}"], ["A"], [CHOICES]) == [1.0]
    assert commonsense_reward([rf"I think \boxed{{{said}}}"], ["B"], [CHOICES]) == [0.0]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "AB",
        "A or B",
        "A, B",
        "A and B",
        "F",
        "A) library",
        "not A",
        "bank or mall",
        "A" * 5000,
        "é",
        "\x00",
        ".",
        "()",
        "K",
    ],
)
def test_what_does_not_name_one_choice_scores_zero(said):
    assert commonsense_reward([rf"\boxed{{{said}}}"], ["A"], [CHOICES]) == [0.0]


def test_words_that_begin_like_a_letter_are_words():
    assert commonsense_reward([r"\boxed{a library}"], ["B"], [CHOICES]) == [1.0]
    assert commonsense_reward([r"\boxed{a library}"], ["A"], [CHOICES]) == [0.0]
    assert commonsense_reward([r"\boxed{department store}", r"\boxed{new york}"], ["C", "E"], [CHOICES] * 2) == [
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    "said",
    [
        "yes",
        "Yes",
        "YES.",
        r"\text{yes}",
        "true",
        "Yes!",
        "yes, it is",
        "Yes, it is true",
        "Answer: yes",
        "The answer is yes",
        r"\textrm{Yes}",
        "Yes. It is.",
    ],
)
def test_yes_and_no(said):
    assert commonsense_reward([rf"\boxed{{{said}}}"] * 2, ["yes", "no"], [[], None]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "maybe",
        "yes and no",
        "yes or no",
        "not yes",
        "A",
        "1/2",
        "1.5",
        "0.5",
        "yes not",
        "no doubt",
        "false alarm",
        "yes, no",
        ".",
    ],
)
def test_neither_yes_nor_no(said):
    assert commonsense_reward([rf"\boxed{{{said}}}"] * 2, ["yes", "no"]) == [0.0, 0.0]


def test_odd_choices_neither_raise_nor_score():
    many = [f"choice {i}" for i in range(40)]
    assert commonsense_reward([r"\boxed{choice 39}", r"\boxed{K}", r"\boxed{choice 10}"], ["K"] * 3, [many] * 3) == [
        0,
        1,
        1,
    ]
    assert commonsense_reward([r"\boxed{}", r"\boxed{.}", r"\boxed{A}"], ["A"] * 3, [[None, ".", 3]] * 3) == [0, 0, 1]
    assert commonsense_reward([r"\boxed{3}", r"\boxed{A}"], ["C", "AB"], [[None, ".", 3]] * 2) == [1, 0]


def test_the_last_box_counts_and_text_without_one_scores_zero():
    assert (
        commonsense_reward(
            [r"\boxed{A} no, \boxed{B}", "A", "", None, [], [{"role": "assistant"}]], ["B"] * 6, [CHOICES] * 6
        )
        == [1.0] + [0.0] * 5
    )
    assert commonsense_reward([[{"role": "assistant", "content": r"\boxed{B}"}]], ["B"], [CHOICES]) == [1.0]
    assert commonsense_reward([r"\boxed{B}"], [None], [CHOICES]) == [None]


def test_rows_of_commonsense_qa():
    row = commonsense_row(
        {
            "id": "x",
            "question": "Where is money kept?",
            "question_concept": "money",
            "choices": {"label": ["A", "B", "C", "D", "E"], "text": CHOICES},
            "answerKey": "A",
        }
    )
    assert row["answer"] == "A" and row["choices"] == CHOICES
    content = row["prompt"][0]["content"]
    assert content.startswith("Where is money kept?") and "(E) New York" in content and r"\boxed{}" in content
    records = [{"label": label, "text": text} for label, text in zip("ABCDE", CHOICES, strict=True)]
    assert commonsense_row({"question": {"stem": "Where is money kept?", "choices": records}, "answerKey": "A"}) == row
    assert commonsense_row({"question": "Where is money kept?", "choices": CHOICES, "answer": "bank"}) == row
    assert commonsense_row({"question": "Where is money kept?", "choices": CHOICES, "label": 0}) == row


@pytest.mark.parametrize(
    ("key", "answer"), [("yes", "yes"), ("no", "no"), ("Yes", "yes"), (True, "yes"), ("false", "no")]
)
def test_rows_of_commonsense_qa_2(key, answer):
    row = commonsense_row({"id": "x", "question": "Is water wet?", "answer": key, "topic_prompt": "x"})
    assert row["answer"] == answer and row["choices"] == [] and "yes or no" in row["prompt"][0]["content"]


def test_a_test_split_without_keys_is_refused_with_advice():
    choices = {"label": ["A", "B"], "text": ["x", "y"]}
    with pytest.raises(ValueError, match="validation split"):
        commonsense_row({"question": "Where?", "choices": choices, "answerKey": ""})
    for row in [
        {},
        {"question": "Is it?"},
        {"question": "Is it?", "answer": "perhaps"},
        {"question": "Which?", "choices": choices, "answerKey": "Z"},
        {"question": "Which?", "choices": [f"choice {i}" for i in range(27)], "answer": "choice 26"},
    ]:
        with pytest.raises(ValueError, match=r"(?s)is not understood.*has \{"):
            commonsense_row(row)
