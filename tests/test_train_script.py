"""`examples/train.py` with shipped recipes, on two CPU processes, then evaluated and compared; and its refusals."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny_policy import DOMAINS, ROOT, save_tiny_policy, script_environment, write_rows


EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import evaluate  # noqa: E402
import train  # noqa: E402


# Each domain by a recipe as it ships: both backbones, and LoRA.
RECIPES = {
    "math": ("math/qwen2.5-math-1.5b-dapo.yaml", []),
    "commonsense": ("commonsense/qwen2.5-1.5b-grpo.yaml", []),
    "code": ("code/qwen2.5-coder-1.5b-dapo.yaml", ["--use_peft", "--lora_r", "4", "--soft_overlong_cache", "8"]),
}
LAUNCH = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",  # on CPUs this is DDP over gloo
    "use_cpu": True,
    "num_processes": 2,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
}
# What a CPU and a tiny policy need instead of the recipe's values.
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_vllm": False,
    "num_generations": 8,
    "generation_batch_size": 32,  # 4 prompts: two optimizer steps
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_prompt_length": 96,
    "max_completion_length": 32,
    "learning_rate": 1e-3,
    "max_steps": 2,
    "save_steps": 2,
}
TIMEOUT = 300  # seconds; 15 to 30 are needed. Processes that wait for each other are a failure, not a delay.


def flags(**values) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def commonsense_flags(policy: Path, folder: Path, **more) -> list[str]:
    """A short run on rows in the folder, into its `out`."""
    return flags(
        task="commonsense",
        dataset_name=write_rows(folder, "commonsense"),
        model_name_or_path=policy,
        output_dir=folder / "out",
        **SMALL | more,
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=DOMAINS)
def trained(request, policy, tmp_path_factory) -> tuple[str, Path, Path]:
    """The domain, its file of problems, and the folder that two processes trained into."""
    domain = request.param
    folder = tmp_path_factory.mktemp(domain)
    rows, output = write_rows(folder, domain), folder / "out"
    recipe, extra = RECIPES[domain]
    (folder / "launch.yaml").write_text(json.dumps(LAUNCH))  # JSON is YAML
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "launch.yaml")]
    command += [str(EXAMPLES / "train.py"), "--config", str(EXAMPLES / "recipes" / recipe)]
    command += flags(**SMALL, model_name_or_path=policy, dataset_name=rows, output_dir=output) + extra
    run_bounded(command, folder)
    return domain, rows, output


def run_bounded(command: list[str], folder: Path) -> None:
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=script_environment(folder), cwd=folder
        )
    try:
        status = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its processes
        process.wait(60)
        status = f"a timeout after {TIMEOUT} s"
    assert status == 0, f"{status}:\n{log.read_text()[-5000:]}"


def logged(output: Path, step: int) -> list[dict]:
    return json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]


def test_two_processes_train_two_steps_on_the_selected_tokens(trained):
    domain, _, output = trained
    steps = logged(output, 2)
    assert [entry["step"] for entry in steps] == [1, 2]
    for rank in (0, 1):  # each process saves its random state
        assert (output / "checkpoint-2" / f"rng_state_{rank}.pth").is_file()
    for entry in steps:
        assert math.isfinite(entry["loss"])
        assert 0 < entry["gmts/kept_fraction"] <= 0.3  # ties at the threshold are all kept
    # Rewards are logged with their generation batch: 32 answers, some right and some wrong.
    (right,) = [entry[f"rewards/{domain}_reward/mean"] for entry in steps if f"rewards/{domain}_reward/mean" in entry]
    assert 0 < right < 1 and right * 32 == pytest.approx(round(right * 32))


def test_grpo_has_its_kl_term_and_dapo_its_overlong_penalty_if_asked(trained):
    domain, _, output = trained
    entry = logged(output, 2)[0]
    assert ("kl" in entry) == (domain == "commonsense")
    assert ("rewards/soft_overlong_punishment_reward/mean" in entry) == (domain == "code")


def test_the_saved_model_is_another_one(trained, policy):
    domain, _, output = trained
    if domain == "code":
        adapter = load_file(output / "adapter_model.safetensors")
        assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    else:
        before, after = (load_file(folder / "model.safetensors") for folder in (policy, output))
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_evaluated_and_compared_with_where_it_began(trained, policy, tmp_path):
    domain, rows, output = trained
    common = flags(task=domain, benchmarks=rows, backend="transformers", dtype="float32", max_completion_length=32)
    common += flags(num_samples=8, temperature=1.0)
    evaluate.main([*common, *flags(model_name_or_path=policy, output_dir=tmp_path / "before")])
    evaluate.main(
        [
            *common,
            *flags(model_name_or_path=output, output_dir=tmp_path / "after", compare_to=tmp_path / "before"),
        ]
    )
    before, after = (json.loads((tmp_path / run / "results.json").read_text())["sets"] for run in ("before", "after"))
    gain = after[domain]["difference"]
    assert gain["value"] == pytest.approx(after[domain]["accuracy"]["value"] - before[domain]["accuracy"]["value"])
    assert gain["low"] <= gain["value"] <= gain["high"]  # all three are 0 where two steps changed no answer
    assert f"against {tmp_path / 'before'}" in (tmp_path / "after" / "results.md").read_text()


def test_resumes_from_the_last_checkpoint(policy, tmp_path):
    arguments = commonsense_flags(
        policy,
        tmp_path,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_steps=1,
        gradient_accumulation_steps=8,
        max_steps=1,
    )
    train.main(arguments)
    first = load_file(tmp_path / "out" / "model.safetensors")
    train.main([*arguments, "--max_steps", "2", "--resume_from_checkpoint", "true"])
    assert [entry["step"] for entry in logged(tmp_path / "out", 2)] == [1, 2]
    assert (tmp_path / "out" / "checkpoint-1" / "model.safetensors").is_file()
    second = load_file(tmp_path / "out" / "model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_says_which_argument_is_missing(capsys):
    with pytest.raises(SystemExit):
        train.parse_arguments(["--task", "math", "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"])
    assert "--dataset_name is missing" in capsys.readouterr().err


def test_a_penalty_longer_than_the_answer_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.parse_arguments(
            [*flags(task="math", dataset_name="x", model_name_or_path="x", output_dir="out", use_cpu=True, bf16=False)]
            + flags(max_completion_length=16, soft_overlong_cache=17)
        )
    assert "soft_overlong_cache (17) must lie between 0 and max_completion_length (16)" in capsys.readouterr().err


def test_a_run_without_a_step_saves_nothing(policy, tmp_path):
    arguments = commonsense_flags(policy, tmp_path, generation_batch_size=512)  # 64 prompts of 8
    with pytest.raises(ValueError, match="No optimizer step was taken"):
        train.main(arguments)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(ValueError, match=r"rows\.jsonl is empty"):
        train.load_rows(str(tmp_path / "rows.jsonl"), None, "train")


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        train.load_rows(str(tmp_path / "rows.jsonl"), None, "train")


def test_prompts_that_are_too_long_are_left_out_whole(policy, tmp_path):
    rows = tmp_path / "rows.jsonl"
    long = {"problem": "1 + " * 200 + "1", "answer": "201"}
    rows.write_text(json.dumps({"problem": "What is 1 + 2?", "answer": "3"}) + "\n" + json.dumps(long) + "\n")
    script_args, args, _ = train.parse_arguments(
        flags(
            task="math",
            dataset_name=rows,
            model_name_or_path=policy,
            output_dir=tmp_path,
            max_prompt_length=96,
            use_cpu=True,
            bf16=False,
        )
    )
    tokenizer = train.AutoTokenizer.from_pretrained(policy)
    task = train.get_task("math")
    kept = train.prompts(script_args, "train", task, tokenizer, args)
    assert len(kept) == 1 and "1 + 2" in kept[0]["prompt"][0]["content"]
    script_args.max_prompt_length = 3
    with pytest.raises(ValueError, match="raise max_prompt_length"):
        train.prompts(script_args, "train", task, tokenizer, args)
