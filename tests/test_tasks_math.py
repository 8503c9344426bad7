r"""Mathematics: rows of the well-known copies, and a reward that survives whatever stands in the box."""

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

from trl_gmts.tasks import MathReward, math_row
from trl_gmts.tasks.answers import last_boxed, text_of


@pytest.fixture(scope="module")
def reward():
    return MathReward(seconds=1.5, workers=1)


def say(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("", None),
        ("no box", None),
        (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{a \boxed{b} c}", r"a \boxed{b} c"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a \boxed{b}", "b"),
        (r"\boxed{\{1, 2)\}}", r"\{1, 2)\}"),
        (r"} } \boxed{5} {", "5"),
        ("\\boxed{é\U0001f600}", "é\U0001f600"),
        ("\\boxed{1\n2}", "1\n2"),
        ("boxed{4}", None),
    ],
)
def test_the_last_closed_box_counts(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 50_000, "{" * 300_000, "}" * 300_000, "\\" * 300_000, r"\boxed{}" * 50_000]
)
def test_finding_the_box_takes_linear_time(text):
    before = time.perf_counter()
    last_boxed(text)
    assert time.perf_counter() - before < 3


def test_the_text_of_a_completion_in_every_form():
    assert text_of("x") == text_of(say("x")) == text_of({"content": "x"}) == "x"
    assert text_of([{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}]) == "x"
    assert text_of([*say("x"), {"role": "tool", "content": "y"}]) == "x"
    for odd in (None, 3, [], [None], [[]], [{}], b"x", say(None), say(3), {"role": "user", "content": "x"}):
        assert text_of(odd) == ""


@pytest.mark.parametrize(
    ("said", "key", "expected"),
    [
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{\boxed{5}}", "5", 1.0),
        (r"so \boxed{3 \boxed{5}}", "5", 0.0),
        (r"so \boxed{\dfrac{1}{2}}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{204}", "204", 1.0),
        (r"\boxed{1} no, \boxed{2}", "1", 0.0),
        (r"\boxed{1} no, \boxed{2}", "2", 1.0),
        (r"\boxed{27}", "27.0", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{x^2 + 1}", "1+x^2", 1.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{70 \text{ cm}}", "70", 1.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        ("the answer is 5", "5", 0.0),
        ("the answer is $5$", "5", 0.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
    ],
)
def test_a_box_is_compared_with_the_key_as_mathematics(reward, said, key, expected):
    assert reward([say(said)], [key]) == reward([said], [key]) == [expected]


def test_a_row_without_a_key_that_can_be_read_is_left_out(reward):
    assert reward([r"\boxed{5}", r"\boxed{5}", "5"], [None, "", ""]) == [None, None, None]


ODD = [
    "",
    r"\boxed{}",
    r"\boxed{",
    "\\boxed{\U0001f600 ünïcödé \x00 \ud800}",
    "\\boxed{" + "9" * 100_000 + "}",
    "\\boxed{" + "9" * 1_900 + "}",
    "\\boxed{" + "(" * 900 + "}",
    "\\boxed{" + r"\frac{1}{" * 200 + "2" + "}" * 200 + "}",
    r"\boxed{\frac{1}{0}}",
    r"\boxed{\boxed{\boxed{}}}",
    r"\boxed{__import__('os').system('true')}",
    r"\boxed{\left( \right]}",
    "\\boxed{1e400}",
    "\\boxed{\n}",
]


def test_odd_text_scores_zero_and_raises_nothing(reward):
    assert reward([say(text) for text in ODD], ["7"] * len(ODD)) == [0.0] * len(ODD)
    assert reward([None, 3, [], [None], [{"role": "assistant", "content": None}]], ["7"] * 5) == [0.0] * 5


@pytest.mark.parametrize("box", ["9^{9^{9^9}}", "10^{10^{10}}", "1000000!", r"\binom{10^9}{5 \cdot 10^8}"])
def test_a_number_too_large_to_compute_ends_in_time(reward, box):
    reward([r"\boxed{1}"], ["1"])  # not to count the start of the process
    before = time.monotonic()
    assert reward([rf"\boxed{{{box}}}"], ["7"]) == [0.0]
    assert time.monotonic() - before < 15
    assert reward([r"\boxed{7}"], ["7"]) == [1.0]


def test_it_works_outside_the_main_thread_and_after_pickling(reward):
    copy = pickle.loads(pickle.dumps(reward))
    results = []
    thread = threading.Thread(target=lambda: results.append(reward([r"\boxed{7}", r"\boxed{9^{9^{9}}}"], ["7", "7"])))
    thread.start()
    thread.join(60)
    assert results == [[1.0, 0.0]]
    assert copy([r"\boxed{7}"], ["7"]) == [1.0]
    assert copy.__name__ == "math_reward"  # the name in TRL's log


def test_a_forked_process_starts_its_own_workers(reward):
    assert reward([r"\boxed{7}"], ["7"]) == [1.0]
    child = os.fork()
    if child == 0:
        os._exit(0 if reward([r"\boxed{8}"], ["8"]) == [1.0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert reward([r"\boxed{6}"], ["6"]) == [1.0]


def test_the_comparing_process_imports_no_torch():
    code = "import sys\nfrom trl.rewards import accuracy_reward\nprint(any(m.split('.')[0] == 'torch' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


PROBLEM = "What is $1+1$?"
ROWS = {
    "math12k": {"problem": PROBLEM, "answer": "2"},
    "math-500": {
        "problem": PROBLEM,
        "solution": r"It is \boxed{2}.",
        "answer": "2",
        "subject": "x",
        "level": 1,
        "unique_id": "x",
    },
    "competition math": {
        "problem": PROBLEM,
        "solution": r"First \boxed{3}, but \boxed{2}.",
        "level": "1",
        "type": "x",
    },
    "aime 2024": {
        "id": 1,
        "problem": PROBLEM,
        "solution": "Long.\nLonger.",
        "answer": "2",
        "url": "x",
        "year": "2024",
    },
    "aime 2024, capitals": {"ID": "1", "Problem": PROBLEM, "Solution": "Long.", "Answer": 2},
    "aime 2024, boxed": {"id": 1, "problem": PROBLEM, "solution": r"\boxed{2}", "url": "x"},
    "amc 23": {"id": 1, "question": PROBLEM, "answer": "2", "url": "x"},
    "minerva": {"question": PROBLEM, "answer": "2"},
    "olympiadbench": {"id": 1, "question": PROBLEM, "solution": ["Long."], "final_answer": ["$2$"], "context": None},
    "dapo, processed": {
        "prompt": PROBLEM,
        "solution": "2",
        "data_source": "x",
        "reward_model": {"ground_truth": "2", "style": "x"},
    },
    "dapo": {
        "data_source": "math_dapo",
        "prompt": [
            {
                "role": "user",
                "content": "Solve the following math problem step by step. The last line of your response should be of the form "
                "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
                + PROBLEM
                + '\n\nRemember to put your answer on its own line after "Answer:".',
            }
        ],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "x"},
    },
    "messages": {"messages": [{"role": "user", "content": PROBLEM}], "extra_info": {"answer": "2"}},
}


@pytest.mark.parametrize("copy", ROWS)
def test_rows_of_the_well_known_copies(copy):
    row = math_row(ROWS[copy])
    assert row["answer"] == "2"
    ((message),) = row["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith(PROBLEM + "\n\n") and r"\boxed{}" in message["content"]
    assert "Answer:" not in message["content"]


def test_several_answers_make_one_key(reward):
    row = math_row({"question": PROBLEM, "final_answer": ["$1$", "$2$"]})
    assert reward([r"\boxed{1, 2}", r"\boxed{2,1}", r"\boxed{1}"], [row["answer"]] * 3) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "row", [{}, {"problem": PROBLEM}, {"answer": "2"}, {"problem": "", "answer": "2"}, {"text": PROBLEM, "y": 2}]
)
def test_a_row_that_is_not_understood_is_refused_with_its_columns(row):
    with pytest.raises(ValueError, match=r"(?s)needs a problem.*has \{"):
        math_row(row)
