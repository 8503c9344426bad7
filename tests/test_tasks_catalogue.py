"""Loading data by name or from a file, and the rewards under TRL's own names and calls."""

import json

import pytest

from trl_gmts.tasks import DOMAINS, SOURCES, load


ROWS = {
    "math": [{"problem": "What is $1+1$?", "answer": "2"}, {"problem": "What is $1+2$?", "answer": "3"}],
    "commonsense": [
        {"question": "Where?", "choices": {"label": ["A", "B"], "text": ["here", "there"]}, "answerKey": "B"},
    ],
    "code": [{"question": "Square it.", "tests": "assert square(3) == 9"}],
}
ANSWERS = {"math": r"\boxed{2}", "commonsense": r"\boxed{B}", "code": "```python\ndef square(x): return x * x\n```"}


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_local_file_becomes_what_training_needs(domain, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[domain]))
    data = load("mine", path=path, domain=domain, limit=1)
    assert len(data) == 1 and data[0]["prompt"][0]["role"] == "user"
    columns = {name: list(data[name]) for name in data.column_names if name != "prompt"}
    answers = [[{"role": "assistant", "content": ANSWERS[domain]}]]
    # as TRL calls a reward function
    reward = DOMAINS[domain].reward()
    assert reward(
        prompts=[data[0]["prompt"]], completions=answers, completion_ids=[[1]], trainer_state=None, **columns
    ) == [1.0]


def test_yes_or_no_questions_load_from_a_file(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "Is it?", "answer": "yes"}, {"question": "Is it not?", "answer": "no"}]))
    data = load("commonsense-qa-2", path=path)
    assert data["answer"][:] == ["yes", "no"] and [list(c) for c in data["choices"]] == [[], []]


def test_what_is_not_known_is_refused_with_what_is(tmp_path):
    with pytest.raises(ValueError, match="math-500"):
        load("math500")
    with pytest.raises(ValueError, match="math, commonsense, code"):
        load("mine", path=tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"\.jsonl"):
        load("mine", path=tmp_path / "rows.txt", domain="math")


def test_a_part_of_a_set_stays_a_part_in_a_local_copy(tmp_path):
    cases = json.dumps([{"input": "3", "output": "9", "testtype": "stdin"}])
    rows = [
        {
            "question_content": "Square it.",
            "contest_date": date,
            "public_test_cases": cases,
            "private_test_cases": "[]",
            "starter_code": "",
        }
        for date in ["2024-06-30T00:00:00", "2024-07-01T00:00:00", "2024-11-30T23:59:00", "2024-12-01T00:00:00"]
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load("livecodebench", path=path)) == 2


def test_every_source_belongs_to_a_domain():
    assert {source.domain for source in SOURCES.values()} == set(DOMAINS)
