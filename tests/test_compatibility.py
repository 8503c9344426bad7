"""docs/compatibility.md names tests that exist, and TRL's own refusals reach the user."""

import ast
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from harness import load_policy
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def rows(section: str) -> list[list[str]]:
    """The cells of the section's tables, without their heads."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S)
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("What", "Refused")]


def names_in(text: str) -> list[str]:
    return [name for name in re.findall(r"`([^`]+)`", text) if re.match(r"(tests/|test_)", name)]


def test_every_test_that_the_page_names_exists():
    names = names_in(PAGE)
    assert len(names) > 40
    missing = []
    for name in names:
        path, _, function = name.partition("::")
        path, _, case = path.partition("[")
        if path.startswith("tests/"):
            file = ROOT / path
            neighbours = "".join(f.read_text() for f in file.parent.glob("*.py")) if file.exists() else ""
            known = file.exists() and (not function or function.split("[")[0] in functions_of(file))
            known = known and (not case or case.rstrip("]") in neighbours)
        else:
            known = any(path in functions_of(file) for file in (ROOT / "tests").rglob("test_*.py"))
        if not known:
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("section", ["Losses", "Generation and inputs", "Refused"])
def test_every_row_names_its_test(section):
    found = rows(section)
    assert len(found) > 8
    assert not [row[0] for row in found if not names_in(row[-1]) and row[1] not in ("not run", "unsupported")]


def test_liger_is_refused_where_it_takes_the_loss(run_dir):
    """Up to TRL 1.14 the kernel computes the loss itself; from 1.15 on the flag is about layers only."""
    arguments = {"output_dir": run_dir, "use_cpu": True, "bf16": False, "use_liger_kernel": True}
    if Version(version("trl")) >= Version("1.15"):
        assert GMTSGRPOConfig(**arguments).use_liger_kernel
        return
    with pytest.raises(ValueError, match="use_liger_kernel=False, or install trl>=1.15"):
        GMTSGRPOConfig(**arguments)
    assert GMTSGRPOConfig(**arguments, token_selection="none").use_liger_kernel


# What TRL refuses

PASSED_ON = {
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
    "vespo with a sequence-level vLLM ratio": (
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"},
        {},
        "token_mask",
    ),
    "sync_ref_model without a reference": ({"sync_ref_model": True}, {}, "beta"),
    "a generation that splits a group": ({"rows": 2, "gradient_accumulation_steps": 1}, {}, "num_generations"),
    "two adapters": ({}, {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])}, "peft_config"),
}


@pytest.mark.parametrize("case", PASSED_ON)
def test_what_trl_refuses_is_refused_with_its_words(run, model_dir, case):
    config, trainer, word = PASSED_ON[case]

    def attempt(trainer_class):
        model = load_policy(model_dir)
        if case == "two adapters":
            model = get_peft_model(model, trainer["peft_config"])
        with pytest.raises((ValueError, NotImplementedError)) as refusal:
            run(trainer_class, model=model, train=False, trainer_arguments=trainer, **config)
        return str(refusal.value)

    message = attempt(GMTSGRPOTrainer)
    assert word in message
    assert message == attempt(GRPOTrainer)
