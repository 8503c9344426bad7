"""Code: the last fenced Python block of an answer, run against the row's tests in a sandbox.

Three styles of tests, told apart when a row is read (`code_row`) and kept in its column `tests` as JSON:

    calls      Python that imports the answer as `solution`; runs in another process than the answer
    programs   pairs of input and output; compared out here
    unittest   cases that share the answer's process, as BigCodeBench's need to; an answer can pass them by cheating
"""

import ast
import base64
import builtins
import io
import json
import pickle
import symtable
import zlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from typing import Any

from .answers import last_python_block, text_of
from .rows import Prompt, Row, first, prompt_of, question_of, refuse
from .sandbox import Isolation, Limits, Sandbox, in_parallel


QUESTION = ("question", "question_content", "instruct_prompt", "complete_prompt", "text", "prompt", "problem")


def code_prompt(question: str, starter: str = "", programs: bool = False) -> Prompt:
    """
    The question, the starter code if there is any, and how to answer.

    Args:
        question (`str`): what to write.
        starter (`str`): code that the answer must use.
        programs (`bool`): the script reads standard input and writes standard output.
    """
    parts = [question]
    if starter:
        parts.append(f"Use this starter code:\n\n```python\n{starter.strip(chr(10))}\n```")
    script = "a self-contained Python script"
    if programs:
        script += " that reads from standard input and writes to standard output"
    elif starter:
        script += " that uses the starter code"
    parts.append(
        f"Write {script}. Reason step by step, then give the whole script in one Markdown block: ```python ... ```"
    )
    return prompt_of("\n\n".join(parts))


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def code_row(row: Row) -> dict[str, Any]:
    """
    One problem with its tests, from a row of KodCode, HumanEval(+), MBPP(+), BigCodeBench, LiveCodeBench, or of one's own:
    a question with `tests`, either Python that imports from `solution` or a list of `{"input": ..., "output": ...}`.

    Returns:
        `prompt` and `tests` (JSON), the columns that `CodeReward` reads.
    """
    question = question_of(row, QUESTION)
    if question is None:
        refuse(row, "code", f"a question ({', '.join(QUESTION)})")
    if first(row, ("public_test_cases", "private_test_cases")):
        starter, tests = live_code_bench(row)
    elif first(row, ("complete_prompt", "instruct_prompt")):
        starter = str(first(row, ("code_prompt",)) or "")
        tests = {"style": "unittest", "tests": str(row["test"])}
    elif first(row, ("test_list",)):
        starter, tests = "", mbpp(row)
        question += "\n\nYour code should pass tests such as:\n\n" + "\n".join(first(row, ("test_list",)))
    elif first(row, ("entry_point",)) and first(row, ("test",)):
        starter, tests = human_eval(row)
        question = f"Complete the function `{first(row, ('entry_point',))}`, as its description says."
    elif first(row, ("test", "test_code")):
        starter = starter_code(row)
        tests = calls(str(first(row, ("test", "test_code"))))
    elif isinstance(first(row, ("tests",)), str):
        starter = str(first(row, ("starter_code", "starter")) or "")
        tests = calls(str(first(row, ("tests",))))
    elif isinstance(first(row, ("tests",)), (list, tuple)):
        starter = ""
        tests = {"style": "programs", "tests": [[str(t["input"]), str(t["output"])] for t in first(row, ("tests",))]}
    else:
        refuse(row, "code", "tests (test, test_code, test_list, public_test_cases or tests)")
    if not tests["tests"]:
        refuse(row, "code", "at least one test")
    return {"prompt": code_prompt(question, starter, tests["style"] == "programs"), "tests": json.dumps(tests)}


def calls(tests: str, names: Iterable[str] | None = None, preamble: str = "") -> dict[str, Any]:
    """
    Tests of the style `calls`. Names that they use and nobody defines are the answer's, and imported by name: an answer
    must not get to replace what the tests call otherwise, a built-in function for one.
    """
    tree = ast.parse(tests)
    star = [node for node in tree.body if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)]
    star = [node for node in star if node.module == "solution"]
    imports_answer = any(
        isinstance(node, (ast.Import, ast.ImportFrom)) and "solution" in ast.unparse(node) for node in tree.body
    )
    if star:
        tree.body = [node for node in tree.body if node not in star]
        tests = ast.unparse(tree)
    if star or not imports_answer:
        wanted = sorted(undefined_names(tests) if names is None else names)
        if wanted:
            tests = f"from solution import {', '.join(wanted)}\n{tests}"
    return {"style": "calls", "tests": tests, "preamble": preamble, "pytest": needs_pytest(tree)}


def undefined_names(code: str) -> set[str]:
    """Names that the code reads and neither defines nor finds among the built-in ones."""
    used: set[str] = set()
    defined: set[str] = set()
    tables = [symtable.symtable(code, "<tests>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            top = table.get_type() == "module" or str(table.get_type()).endswith("MODULE")
            if (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()) and (
                top or symbol.is_declared_global()
            ):
                defined.add(symbol.get_name())
            if symbol.is_referenced() and (top or symbol.is_global()):
                used.add(symbol.get_name())
    return used - defined - set(dir(builtins)) - {"__name__", "__file__"}


def needs_pytest(tree: ast.Module) -> bool:
    """Whether tests need more than calling their `test_` functions: fixtures, classes, marks, `pytest.raises`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "pytest" for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pytest":
            return True
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")
            and (node.args.args or node.args.kwonlyargs)
        ):
            return True
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or "TestCase" in ast.unparse(node)):
            return True
    return False


def starter_code(row: Row) -> str:
    """KodCode's function declaration, where it has one."""
    declaration = first(row, ("test_info.function_declaration", "starter_code"))
    if declaration:
        return str(declaration)
    name = first(row, ("test_entry_point", "entry_point"))
    return f"def {name}(...):" if name else ""


def human_eval(row: Row) -> tuple[str, dict[str, Any]]:
    """HumanEval's prompt is code, and may define helpers that its tests use: it comes before the answer."""
    prompt, name = str(first(row, ("prompt",))), str(first(row, ("entry_point",)))
    tests = f"{first(row, ('test',))}\n\ncheck({name})\n"
    return prompt, calls(tests, preamble=prompt if compiles(prompt) else "")


def mbpp(row: Row) -> dict[str, Any]:
    """MBPP's assertions, or MBPP+'s longer test where it is there."""
    setup = first(row, ("test_setup_code",)) or "\n".join(first(row, ("test_imports",)) or ())
    return calls(str(first(row, ("test",)) or "\n".join([setup, *first(row, ("test_list",))])))


def live_code_bench(row: Row) -> tuple[str, dict[str, Any]]:
    cases = [*test_cases(first(row, ("public_test_cases",))), *test_cases(first(row, ("private_test_cases",)))]
    starter = str(first(row, ("starter_code",)) or "")
    if not any(case.get("testtype") == "functional" for case in cases):
        return "", {"style": "programs", "tests": [[case["input"], case["output"]] for case in cases]}
    metadata = first(row, ("metadata",)) or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if not metadata.get("func_name"):
        refuse(row, "code", "metadata with a func_name, since its tests are calls")
    lines = [
        "from solution import Solution",
        "plain = lambda value: list(value) if isinstance(value, tuple) else value",
    ]
    for case in cases:
        arguments = ", ".join(repr(json.loads(line)) for line in case["input"].split("\n") if line.strip())
        lines.append(
            f"assert plain(Solution().{metadata['func_name']}({arguments})) == {json.loads(case['output'])!r}"
        )
    # LeetCode's starter code uses these without importing them.
    return starter, calls(
        "\n".join(lines),
        preamble="from typing import *\nfrom collections import *\nimport math, heapq, bisect, itertools, functools",
    )


def test_cases(value: Any) -> list[dict[str, str]]:
    """LiveCodeBench's test cases: a list, JSON of one, or that pickled, compressed and in base64."""
    if not value:
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = NothingButText(io.BytesIO(zlib.decompress(base64.b64decode(value)))).load()
            value = json.loads(value)
    return [dict(case) for case in value]


class NothingButText(pickle.Unpickler):
    """Unpickling runs what the data names. The dataset's pickles hold a string, which names nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"test cases hold {module}.{name}, where only text is expected")


def compiles(code: str) -> bool:
    try:
        compile(code, "<starter>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The reward
# ---------------------------------------------------------------------------------------------------------------------


class CodeReward:
    """
    1 for an answer whose last Python block passes all tests of its row, 0 otherwise, None (TRL leaves the row out) where the
    row has no tests.

    Args:
        isolation (`str`): `"bubblewrap"`, or by name the weaker `"rlimits"`; see `Sandbox`.
        limits (`Limits`): what one run of an answer may use.
        packages (`bool`): let answers and tests import what is installed beside this package.
        workers (`int`, *optional*): answers run at a time. By default this process's share of cores.
        same_process (`bool`): accept tests of the style `unittest`, which share the answer's process. To measure a model on
            BigCodeBench; a model trained on such tests can learn to switch them off.
    """

    __name__ = "code_reward"

    def __init__(
        self,
        isolation: Isolation = "bubblewrap",
        limits: Limits | None = None,
        packages: bool = True,
        workers: int | None = None,
        same_process: bool = False,
    ):
        self.sandbox = Sandbox(isolation, limits or Limits(), packages)
        self.workers = workers
        self.same_process = same_process
        self._checked = False

    def __call__(self, completions: Sequence[Any], tests: Sequence[str | None], **kwargs: Any) -> list[float | None]:
        """
        Args:
            completions: strings or conversations.
            tests: the column `tests` of `code_row`.
        """
        parsed = [None if text is None else self._accept(json.loads(text)) for text in tests]
        if not self._checked:
            self.sandbox.check()
            self._checked = True
        codes = [last_python_block(text_of(completion)) for completion in completions]
        pairs = list(zip(codes, parsed, strict=True))
        # The answers of a group are often the same: run once.
        keys = [None if code is None or test is None else (code, json.dumps(test)) for code, test in pairs]
        wanted = {key: pair for key, pair in zip(keys, pairs, strict=True) if key is not None}
        passed = in_parallel(
            lambda pair: passes(self.sandbox, pair[0] or "", pair[1] or {}), [*wanted.values()], self.workers
        )
        rewards = {key: float(ok) for key, ok in zip(wanted, passed, strict=True)}
        return [
            None if test is None else 0.0 if key is None else rewards[key]
            for key, test in zip(keys, parsed, strict=True)
        ]

    def _accept(self, test: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse tests that this reward cannot run: a reward of zero for all would hide it."""
        if test["style"] == "unittest" and not self.same_process:
            raise ValueError(
                "these tests (unittest cases, as BigCodeBench's) run in the answer's own process, where an answer can pass "
                "without solving anything. Train on other tests; to measure a model with them, pass same_process=True"
            )
        if test.get("pytest") and (find_spec("pytest") is None or not self.sandbox.packages):
            raise ImportError(
                "these tests (as KodCode's) need pytest in the sandbox: pip install 'trl-gmts[code]', and leave packages=True"
            )
        return test


def passes(sandbox: Sandbox, code: str, test: Mapping[str, Any]) -> bool:
    """
    Whether code passes tests, given as `code_row` keeps them in its column (parsed). Run it on a dataset's own solutions to
    leave out the rows that nobody can solve in the sandbox.
    """
    if "\0" in code:
        return False
    if test["style"] == "programs":
        for given, expected in test["tests"]:
            run = sandbox.run_program(code, given)
            if not run.succeeded or not same_output(run.output, expected):
                return False
        return True
    if test["style"] == "unittest":
        return sandbox.passes_together(code, test["tests"], preamble=test.get("preamble", ""))
    return sandbox.passes_tests(
        code, test["tests"], preamble=test.get("preamble", ""), pytest=test.get("pytest", False)
    )


def same_output(output: str, expected: str) -> bool:
    """Line by line, without regard to space at the ends; within a line also number by number (1.0 is 1)."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    if len(ours) != len(theirs):
        return False
    return all(a == b or same_words(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True))


def same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(a == b or same_number(a, b) for a, b in zip(ours, theirs, strict=True))


def same_number(a: str, b: str) -> bool:
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False
