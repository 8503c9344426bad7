"""Tasks by name, over local files, called as TRL calls a reward function."""

import json
import pickle

import pytest
from datasets import load_dataset
from trl.trainer.utils import get_callable_name

from trl_gmts.tasks import get_task


ROWS = {
    "math": [{"problem": "What is $1+1$?", "answer": "2"}, {"problem": "What is $1+2$?", "answer": "3"}],
    "commonsense": [
        {"question": "Where?", "choices": {"label": ["A", "B"], "text": ["here", "there"]}, "answerKey": "B"},
        {"question": "Which?", "choices": {"label": ["A", "B"], "text": ["this", "that"]}, "answerKey": "A"},
    ],
    "code": [
        {"question": "Square it.", "tests": "assert square(3) == 9"},
        {"question": "Do.", "tests": "assert square(2) == 4"},
    ],
}
RIGHT = {"math": r"\boxed{2}", "commonsense": r"\boxed{B}", "code": "```python\ndef square(x): return 9\n```"}


@pytest.mark.parametrize("name", ROWS)
def test_a_local_file_becomes_prompts_and_rewards(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    raw = load_dataset("json", data_files=str(path), split="train")
    task = pickle.loads(pickle.dumps(get_task(name)))
    data = raw.map(task.example, remove_columns=raw.column_names)
    assert [message["role"] for prompt in data["prompt"] for message in prompt] == ["user", "user"]
    columns = {column: list(data[column]) for column in data.column_names if column != "prompt"}
    answers = [[{"role": "assistant", "content": RIGHT[name]}]] * 2
    arguments = {
        "prompts": list(data["prompt"]),
        "completion_ids": [[1], [1]],
        "trainer_state": None,
        "log_extra": print,
    }
    assert task.reward(completions=answers, **arguments, **columns) == [1.0, 0.0]
    assert get_callable_name(task.reward) == f"{name}_reward"


def test_options_go_to_the_reward():
    assert get_task("code", isolation="rlimits").reward.sandbox.isolation == "rlimits"
    assert get_task("math", workers=3).reward.workers == 3


def test_what_is_not_known_is_refused_with_what_is():
    with pytest.raises(ValueError, match="math, commonsense, code"):
        get_task("chess")
    with pytest.raises(ValueError, match="no options"):
        get_task("commonsense", workers=3)
