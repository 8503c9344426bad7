"""Code: rows of the well-known data sets, the block that counts, and the reward."""

import base64
import json
import pickle
import zlib

import pytest

from trl_gmts.tasks import CodeReward, Limits, Sandbox, code_row, passes
from trl_gmts.tasks.answers import last_python_block
from trl_gmts.tasks.code import calls, same_output


pytestmark = pytest.mark.sandbox

LIMITS = Limits(wall_seconds=30.0)
SQUARE = "def square(x):\n    return x * x"
WRONG = "def square(x):\n    return 0"


def fenced(code, language="python"):
    return f"I think.\n\n```{language}\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", None),
        ("x = 1", None),
        (fenced("x = 1"), "x = 1"),
        (fenced("x = 1", "py") + fenced("x = 2", "Python"), "x = 2"),
        (fenced("x = 1") + "\n" + fenced("$ ls", "bash"), "x = 1"),
        (fenced("x = 1") + "\n" + fenced("plain", ""), "x = 1"),
        (fenced("x = 1", ""), "x = 1"),
        (fenced("x = 1", "c++"), None),
        (fenced("x = 1") + "\n```python\nx = 2", "x = 1"),
        ("```python\nx = 1", None),
        ("```", None),
        ("```python\n```", ""),
        ("~~~python\nx = '```'\n~~~", "x = '```'"),
        ("````python\n```\nx\n```\n````", "```\nx\n```"),
        ("   ```python\n   x = 1\n   ```", "x = 1"),
        ("1. So:\n  ```python\n  if x:\n    y\n z\n  ```", "if x:\n  y\n z"),
        (fenced("x = 1", "python3.11"), "x = 1"),
        (fenced("x = 1", "ipython3"), "x = 1"),
        (fenced("x = 1", "pyret"), None),
        (fenced("x = '\u2028\x0c'"), "x = '\u2028\x0c'"),
        (fenced("x = 1\ny = 2").replace("\n", "\r\n"), "x = 1\ny = 2"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1"),
        ("```python title='a'\nx = 1\n```", "x = 1"),
    ],
)
def test_the_last_closed_python_block_counts(text, code):
    assert last_python_block(text) == code


CHECK = "def check(candidate):\n    assert candidate(3) == 9\n    assert square_root(9) == 3\n"
HELPER = "def square_root(x):\n    return x ** 0.5\n\n\ndef square(x):\n    '''Return x squared.'''\n"
CASES = "import unittest\nclass TestCases(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(square(3), 9)\n"


def live_code_bench(cases, encoded=True, **row):
    private = json.dumps(cases)
    if encoded:
        private = base64.b64encode(zlib.compress(pickle.dumps(private))).decode()
    metadata = json.dumps({"func_name": "square"}) if "starter_code" in row else "{}"
    return {
        **{
            "question_title": "x",
            "question_content": "Square it.",
            "platform": "x",
            "starter_code": "",
            "difficulty": "easy",
        },
        **{"public_test_cases": json.dumps(cases[:1]), "private_test_cases": private, "metadata": metadata, **row},
    }


PROGRAM = "print(int(input()) ** 2)"
ROWS = {
    "kodcode": (
        {
            "style": "instruct",
            "question": "Square it.",
            "solution": SQUARE,
            "test": "from solution import square\n\ndef test_square():\n    assert square(3) == 9\n",
            "test_info": [{"function_name": "square", "function_declaration": "def square(x):", "docstring": ""}],
        },
        SQUARE,
        WRONG,
    ),
    "kodcode, sft": (
        {
            "question": "Square it.",
            "test_code": "from solution import *\nimport pytest\n\n@pytest.mark.parametrize('x', [1, 3])\n"
            "def test_square(x):\n    assert square(x) == x ** 2\n",
            "test_entry_point": "square",
        },
        SQUARE,
        WRONG,
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": HELPER,
            "canonical_solution": "x",
            "test": CHECK,
            "entry_point": "square",
        },
        SQUARE,
        WRONG,
    ),
    "mbpp": (
        {
            "task_id": 1,
            "text": "Square it.",
            "code": SQUARE,
            "test_list": ["assert square(3) == 9"],
            "test_setup_code": "",
        },
        SQUARE,
        WRONG,
    ),
    "mbpp, sanitized": (
        {
            "prompt": "Square it.",
            "code": SQUARE,
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(square(3), 9)"],
        },
        SQUARE,
        WRONG,
    ),
    "mbpp plus": (
        {
            "prompt": "Square it.",
            "test_imports": [],
            "test_list": ["assert square(3) == 9"],
            "test": "import math\ninputs = [[3], [2]]\nresults = [9, 4]\nfor inp, exp in zip(inputs, results):\n"
            "    assert math.isclose(square(*inp), exp)\n",
        },
        SQUARE,
        WRONG,
    ),
    "livecodebench, programs": (
        live_code_bench(
            [
                {"input": "3\n", "output": "9\n", "testtype": "stdin"},
                {"input": "2", "output": "4", "testtype": "stdin"},
            ]
        ),
        PROGRAM,
        "print(9)",
    ),
    "livecodebench, functions": (
        live_code_bench(
            [
                {"input": "3", "output": "9", "testtype": "functional"},
                {"input": "2", "output": "4", "testtype": "functional"},
            ],
            encoded=False,
            starter_code="class Solution:\n    def square(self, x: int) -> List[int]:\n        ",
        ),
        "class Solution:\n    def square(self, x: int) -> List[int]:\n        return x * x",
        "class Solution:\n    def square(self, x):\n        return 9",
    ),
    "own, calls": ({"question": "Square it.", "tests": "assert square(3) == 9"}, SQUARE, WRONG),
    "own, programs": ({"prompt": "Square it.", "tests": [{"input": "3", "output": "9"}]}, PROGRAM, "print(8)"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_well_known_sets(name):
    raw, right, wrong = ROWS[name]
    row = code_row(raw)
    content = row["prompt"][0]["content"]
    assert "self-contained Python script" in content and "```python" in content and "step" in content
    reward = CodeReward(limits=LIMITS)
    assert reward([fenced(right), fenced(wrong), "no code"], [row["tests"]] * 3) == [1.0, 0.0, 0.0]


def test_the_prompt_shows_the_starter_code_or_says_how_input_comes():
    def prompt(name):
        return code_row(ROWS[name][0])["prompt"][0]["content"]

    assert "def square(x):" in prompt("kodcode") and "Square it." in prompt("kodcode")
    assert "Return x squared." in prompt("humaneval") and "`square`" in prompt("humaneval")
    assert "assert square(3) == 9" in prompt("mbpp")
    assert "standard input" in prompt("livecodebench, programs")
    assert "class Solution" in prompt("livecodebench, functions") and "standard input" not in prompt(
        "livecodebench, functions"
    )


BIG_CODE_BENCH = {
    "task_id": "BigCodeBench/0",
    "complete_prompt": "x",
    "instruct_prompt": "Square it.",
    "code_prompt": "def square(x):\n",
    "test": CASES,
    "entry_point": "square",
    "libs": "[]",
}


def test_cases_in_the_answers_own_process_are_refused_unless_asked_for():
    tests = [code_row(BIG_CODE_BENCH)["tests"]] * 2
    with pytest.raises(ValueError, match="same_process=True"):
        CodeReward(limits=LIMITS)([fenced(SQUARE)] * 2, tests)
    assert CodeReward(limits=LIMITS, same_process=True)([fenced(SQUARE), fenced(WRONG)], tests) == [1.0, 0.0]


def test_pickled_test_cases_that_are_more_than_text_are_refused(tmp_path):
    class Run:
        def __reduce__(self):
            return open, (str(tmp_path / "x"), "w")

    row = live_code_bench([{"input": "3", "output": "9", "testtype": "stdin"}])
    row["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Run()))).decode()
    with pytest.raises(pickle.UnpicklingError, match="only text"):
        code_row(row)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "row",
    [{}, {"question": "x"}, {"test": "assert f()"}, {"question": "x", "tests": []}, {"question": "x", "tests": 3}],
)
def test_a_row_that_is_not_understood_is_refused_with_its_columns(row):
    with pytest.raises(ValueError, match=r"(?s)is not understood.*has \{"):
        code_row(row)


def test_only_names_that_nobody_defines_are_imported_from_the_answer():
    def line(tests):
        return calls(tests)["tests"].split("\n")[0]

    assert line("import math\nx = 3\nassert set(f(x)) == {math.pi}") == "from solution import f"
    assert line("def helper(y):\n    z = y\n    return g(z)\nassert helper(1)") == "from solution import g"
    assert line("from solution import f\nassert f(h)") == "from solution import f"
    assert line("for a, b in [(1, 2)]:\n    assert f(a) == b and [c for c in f(b)]") == "from solution import f"


def test_an_answer_cannot_replace_a_built_in_function_that_its_tests_use():
    row = code_row({"prompt": "x", "test_list": ["assert set(f(1)) == {1, 2}"]})
    cheat = "set = lambda x: {1, 2}\ndef f(x):\n    return []"
    assert CodeReward(limits=LIMITS)([fenced(cheat), fenced("def f(x):\n    return [1, 2]")], [row["tests"]] * 2) == [
        0.0,
        1.0,
    ]


ODD = [
    "",
    "```python",
    "```python\n\x00\n```",
    "```python\n\ud800\n```",
    "```python\né = '\U0001f600'\n```",
    fenced("x" * 200_000),
    fenced("(" * 5000),
]


def test_odd_text_scores_zero_and_raises_nothing():
    tests = code_row(ROWS["own, calls"][0])["tests"]
    programs = code_row(ROWS["own, programs"][0])["tests"]
    odd = [*ODD, None, 3, [], [None], [{"role": "assistant", "content": None}]]
    reward = CodeReward(limits=LIMITS)
    assert reward(odd, [tests] * len(odd)) == [0.0] * len(odd)
    assert reward(odd, [programs] * len(odd)) == [0.0] * len(odd)
    assert reward([fenced(SQUARE)], [None]) == [None]
    assert reward([], []) == []


def test_conversations_and_repeated_answers_are_scored_in_order():
    tests = code_row(ROWS["own, calls"][0])["tests"]
    answers = [[{"role": "assistant", "content": fenced(code)}] for code in [SQUARE, WRONG, SQUARE]]
    reward = pickle.loads(pickle.dumps(CodeReward(limits=LIMITS, workers=2)))
    assert reward(answers, [tests] * 3, prompts=[None] * 3, trainer_state=None) == [1.0, 0.0, 1.0]
    assert reward.__name__ == "code_reward"  # the name in TRL's log


def test_a_data_sets_own_solutions_can_be_tried():
    test = json.loads(code_row(ROWS["kodcode"][0])["tests"])
    assert passes(Sandbox(limits=LIMITS), SQUARE, test) and not passes(Sandbox(limits=LIMITS), WRONG, test)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("9\n", "9", True),
        ("1 2 \n3\n", "1 2\n3", True),
        ("1.0 2", "1 2.00", True),
        ("yes", "YES", False),
        ("1\n2", "1 2", False),
        ("1 2 3", "1 2", False),
        ("", "", True),
        ("nan", "nan", True),
        ("x" * 10, "9", False),
    ],
)
def test_outputs_are_compared_word_by_word(output, expected, same):
    assert same_output(output, expected) == same
