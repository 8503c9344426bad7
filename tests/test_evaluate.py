"""`examples/evaluate.py`: its statistics against first principles, and answer files that survive being killed."""

import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest

from tiny_policy import ROOT, save_tiny_policy, script_environment, write_rows


EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import evaluate  # noqa: E402
from evaluate_benchmarks import BENCHMARKS, PAPER  # noqa: E402
from evaluate_statistics import Estimate, accuracy, difference, mean_of_sets, pass_at_k  # noqa: E402


def sampled_answers(rng, problems: int, samples: int, a: float, b: float) -> list[list[bool]]:
    """Each problem has its own chance of a right answer, drawn from a beta distribution."""
    chances = [rng.betavariate(a, b) for _ in range(problems)]
    return [[rng.random() < chance for _ in range(samples)] for chance in chances]


# Statistics


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.7), (20, 20)], ids=["problems differ", "problems alike"])
def test_the_interval_covers_the_truth_as_often_as_it_says(a, b):
    rng, runs, truth = random.Random(0), 1000, a / (a + b)
    estimates = [accuracy(sampled_answers(rng, 30, 16, a, b)) for _ in range(runs)]
    assert 0.93 < fmean(estimate.low <= truth <= estimate.high for estimate in estimates) < 0.98


def test_answers_taken_for_independent_would_cover_it_half_as_often():
    rng, runs, hits = random.Random(0), 1000, 0
    for _ in range(runs):
        mean = fmean(map(fmean, sampled_answers(rng, 30, 16, 0.3, 0.7)))
        hits += abs(mean - 0.3) <= 1.96 * math.sqrt(mean * (1 - mean) / 480)
    assert hits / runs < 0.6


def test_repeating_an_answer_adds_no_certainty():
    once = [[i % 3 == 0] for i in range(30)]
    assert accuracy([answers * 16 for answers in once]) == accuracy(once)


@pytest.mark.parametrize("right", [False, True])
def test_all_right_or_all_wrong_still_leaves_doubt(right):
    estimate = accuracy([[right] * 16] * 30)
    assert estimate.value == right
    assert 0 <= estimate.low <= right <= estimate.high <= 1
    assert 0.05 < estimate.high - estimate.low < 0.2


def test_one_problem_says_nothing_about_others():
    assert accuracy([[True, False]]) == Estimate(0.5, 0.0, 1.0)


def test_greedy_accuracy_has_the_textbook_wilson_interval():
    estimate = accuracy([[i < 30] for i in range(100)])
    z, n, p = 1.984, 99, 0.3  # Student's t for 99 degrees; a variance over n - 1
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (estimate.low, estimate.high) == pytest.approx(
        ((center - half) / (1 + z * z / n), (center + half) / (1 + z * z / n)), abs=1e-4
    )


def test_the_errors_of_sets_add_up_as_squares():
    mean = mean_of_sets([Estimate(0.5, 0.4, 0.6), Estimate(0.3, 0.2, 0.4)])
    assert (mean.value, mean.low, mean.high) == pytest.approx(
        (0.4, 0.4 - 0.1 / math.sqrt(2), 0.4 + 0.1 / math.sqrt(2))
    )


def test_a_paired_difference_is_not_blurred_by_how_hard_problems_are():
    rng = random.Random(0)
    theirs = sampled_answers(rng, 200, 16, 0.3, 0.7)
    ours = [[True, *answers[1:]] for answers in theirs]  # one answer more
    paired, alone = difference(ours, theirs), accuracy(ours)
    assert paired.low > 0
    assert paired.high - paired.low < (alone.high - alone.low) / 3
    back = difference(theirs, ours)
    assert (back.value, back.low, back.high) == pytest.approx((-paired.value, -paired.high, -paired.low))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(k):
    correct = [[True, False, False, True, False], [False] * 5, [True] * 5, [False, True, False, False, False]]
    expected = fmean(fmean(any(subset) for subset in itertools.combinations(answers, k)) for answers in correct)
    assert pass_at_k(correct, k) == pytest.approx(expected)


def test_pass_at_k_needs_k_answers():
    with pytest.raises(ValueError, match="at least 4"):
        pass_at_k([[True, False]], 4)


def test_powers_of_two_end_with_the_number_of_answers():
    assert [evaluate.powers_of_two(n) for n in (1, 12, 16)] == [[1], [1, 2, 4, 8, 12], [1, 2, 4, 8, 16]]


def test_the_papers_rows_name_known_sets():
    for task, rows in PAPER.items():
        for row in rows:
            assert set(row.sets or ()) <= set(BENCHMARKS[task])


# Runs


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("tiny"), steps=60)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), "commonsense", copies=2)


def arguments(policy: Path, rows: Path, output: Path, **more) -> list[str]:
    values = {
        "task": "commonsense",
        "model_name_or_path": policy,
        "benchmarks": rows,
        "backend": "transformers",
        "dtype": "float32",
        "num_samples": 4,
        "batch_size": 2,
        "max_completion_length": 24,
        "output_dir": output,
    }
    return [word for name, value in (values | more).items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def whole(policy, rows, tmp_path_factory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    evaluate.main(arguments(policy, rows, folder))
    return folder


def results(folder: Path) -> dict:
    loaded = json.loads((folder / "results.json").read_text())
    del loaded["arguments"]["output_dir"]
    return loaded


def test_killed_half_way_and_restarted_gives_the_same_files(policy, rows, whole, tmp_path):
    answers = tmp_path / "commonsense.answers.jsonl"
    command = [sys.executable, str(EXAMPLES / "evaluate.py"), *arguments(policy, rows, tmp_path)]
    process = subprocess.Popen(
        command, env=script_environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not answers.exists() or answers.read_text().count("\n") < 3:  # settings, then a batch of two problems
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    survived = answers.read_text()
    total = (whole / answers.name).read_text()
    assert total.startswith(survived) and len(survived) < len(total)

    evaluate.main(arguments(policy, rows, tmp_path))
    assert answers.read_text() == total
    assert results(tmp_path) == results(whole)


@pytest.mark.parametrize("cut", [7, 0.3, 0.55, 0.999], ids=str)
def test_a_file_cut_anywhere_is_completed(policy, rows, whole, tmp_path, cut):
    total = (whole / "commonsense.answers.jsonl").read_text()
    answers = tmp_path / "commonsense.answers.jsonl"
    answers.write_text(total[: cut if isinstance(cut, int) else int(cut * len(total))])
    evaluate.main(arguments(policy, rows, tmp_path))
    assert answers.read_text() == total


def test_other_settings_do_not_continue_a_file(policy, rows, whole):
    with pytest.raises(ValueError, match=r"other settings \(temperature: 1.0\)"):
        evaluate.main(arguments(policy, rows, whole, temperature=0.5))


def test_other_problems_do_not_continue_a_file(policy, rows, whole, tmp_path):
    other = tmp_path / "commonsense.jsonl"
    other.write_text("\n".join(reversed(rows.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="other problems"):
        evaluate.main(arguments(policy, other, whole))


def test_other_weights_or_keys_do_not_continue_a_file(policy, rows, whole, tmp_path):
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(policy, model)
    output.mkdir()
    evaluate.main(arguments(model, rows, output, limit=2))
    other = tmp_path / "commonsense.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[0]["answerKey"] = "B" if lines[0]["answerKey"] != "B" else "A"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="other problems"):
        evaluate.main(arguments(model, other, output, limit=2))
    with (model / "model.safetensors").open("r+b") as file:
        os.utime(file.fileno(), (1, 1))
    with pytest.raises(ValueError, match=r"other settings \(weights: "):
        evaluate.main(arguments(model, rows, output, limit=2))


@pytest.mark.parametrize("text", ["{}\n[]\n", "not json\n", '"x"\n', "{}\n{}\n"])
def test_a_file_that_holds_no_answers_is_named(policy, rows, tmp_path, text):
    (tmp_path / "commonsense.answers.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"commonsense.answers.jsonl is not a file of answers"):
        evaluate.main(arguments(policy, rows, tmp_path))


@pytest.mark.parametrize(
    "values", [{"num_samples": 0}, {"batch_size": 0}, {"limit": 0}, {"temperature": -1.0}], ids=str
)
def test_numbers_that_cannot_be_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        evaluate.EvaluateArguments(task="math", **values)


def test_the_report_has_what_the_files_have(whole):
    result = results(whole)["sets"]["commonsense"]
    lines = (whole / "commonsense.answers.jsonl").read_text().splitlines()[1:]
    scores = [json.loads(line)["scores"] for line in lines]
    assert result["problems"] == len(scores) == 16 and all(len(row) == 4 for row in scores)
    assert result["accuracy"]["value"] == pytest.approx(fmean(map(fmean, scores)))
    assert result["pass_at_k"]["1"] == pytest.approx(result["accuracy"]["value"])
    assert result["pass_at_k"]["4"] == pytest.approx(fmean(max(row) for row in scores))
    report = (whole / "results.md").read_text()
    assert f"| commonsense | 16 | {100 * result['accuracy']['value']:.2f} |" in report
    assert "| Qwen2.5-1.5B, DAPO | 7.20 | 64.97 | 65.46 | 66.33 | – |" in report  # other sets than the paper's


def test_the_papers_own_sets_are_put_beside_its_numbers(policy, rows, tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in BENCHMARKS["commonsense"]]
    for file in files:
        file.write_text(rows.read_text())
    given = arguments(policy, rows, tmp_path / "out", limit=3)
    where = given.index("--benchmarks") + 1
    given[where : where + 1] = map(str, files)
    evaluate.main(given)
    mean = results(tmp_path / "out")["mean_over_the_papers_sets"]["Qwen2.5-1.5B, DAPO"]["value"]
    report = (tmp_path / "out" / "results.md").read_text()
    assert f"| Qwen2.5-1.5B, DAPO | 7.20 | 64.97 | 65.46 | 66.33 | {100 * mean:.2f} |" in report
    assert "| **mean of the sets** |" in report


def test_greedy_answers_do_not_depend_on_padding(policy, rows, tmp_path):
    greedy = {"num_samples": 1, "temperature": 0}
    for size in (1, 16):
        evaluate.main(arguments(policy, rows, tmp_path / str(size), batch_size=size, **greedy))
    one, all_at_once = (
        [
            json.loads(line)["answers"]
            for line in (tmp_path / size / "commonsense.answers.jsonl").read_text().splitlines()[1:]
        ]
        for size in ("1", "16")
    )
    assert one == all_at_once


def test_a_comparison_needs_the_same_problems(policy, rows, whole, tmp_path):
    other = tmp_path / "commonsense.jsonl"
    other.write_text("\n".join(reversed(rows.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="same problems"):
        evaluate.main(arguments(policy, other, tmp_path / "out", compare_to=whole))
    with pytest.raises(FileNotFoundError, match="compare_to"):
        evaluate.main(arguments(policy, rows, tmp_path / "out2", compare_to=tmp_path / "nothing"))


def test_many_greedy_answers_are_refused():
    with pytest.raises(ValueError, match="same greedy answer"):
        evaluate.parse_arguments(["--task", "math", "--model_name_or_path", "x", "--temperature", "0"])


def test_an_unknown_set_is_refused_with_the_known_ones():
    args = evaluate.parse_arguments(["--task", "math", "--model_name_or_path", "x", "--benchmarks", "aime"])
    with pytest.raises(ValueError, match="aime-2024, aime-2025"):
        evaluate.chosen_benchmarks(args)


def test_the_defaults_are_the_papers():
    for task, samples, temperature in (("math", 16, 1.0), ("commonsense", 16, 1.0), ("code", 1, 0.0)):
        args = evaluate.parse_arguments(["--task", task, "--model_name_or_path", "x"])
        assert (args.num_samples, args.temperature) == (samples, temperature)
        assert list(evaluate.chosen_benchmarks(args)) == list(BENCHMARKS[task])
