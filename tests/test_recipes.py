"""Every shipped recipe parses, says what the paper says, marks what the paper does not, and adds up on 8 GPUs."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml


EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from train import parse_arguments  # noqa: E402


RECIPES = sorted((EXAMPLES / "recipes").glob("*/*.yaml"))
GPUS = 8

# The paper's settings (arXiv 2608.30632), independently of the YAML files.
COMMON = {
    "seed": 0,
    "token_selection": "gmts",
    "selection_ratio": 0.2,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "num_generations": 16,
    "temperature": 1.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
}
BACKBONES = {
    "dapo": {"loss_type": "dapo", "beta": 0.0},
    "grpo": {"loss_type": "grpo", "beta": 0.001, "use_bias_correction_kl": False},
}
# task, model: prompts a batch, prompts an optimizer step, longest prompt, longest answer, learning rate
MODELS = {
    ("math", "Qwen/Qwen2.5-Math-1.5B"): (64, 64, 1024, 2048, 3e-5),
    ("math", "Qwen/Qwen2.5-Math-7B"): (64, 64, 1024, 2048, 3e-5),
    ("math", "Qwen/Qwen3-8B"): (512, 32, 1024, 4096, 1e-6),
    ("code", "Qwen/Qwen2.5-Coder-1.5B"): (512, 32, 2048, 32768, 1e-6),
    ("code", "Qwen/Qwen2.5-Coder-7B"): (512, 32, 2048, 32768, 1e-6),
    ("commonsense", "Qwen/Qwen2.5-1.5B"): (512, 32, 1024, 4096, 1e-6),
    ("commonsense", "Qwen/Qwen2.5-7B"): (512, 32, 1024, 4096, 1e-6),
}


def paper_settings(path: Path) -> dict:
    task, (model, backbone) = path.parent.name, path.stem.rsplit("-", 1)
    names = {(t, name.split("/")[1].lower()): name for t, name in MODELS}
    name = names[task, model]
    prompts, _, longest_prompt, longest_answer, learning_rate = MODELS[task, name]
    return {
        **COMMON,
        **BACKBONES[backbone],
        "task": task,
        "model_name_or_path": name,
        "max_prompt_length": longest_prompt,
        "max_completion_length": longest_answer,
        "generation_batch_size": prompts * 16,
        "learning_rate": learning_rate,
    }


@pytest.fixture(params=RECIPES, ids=[f"{path.parent.name}/{path.stem}" for path in RECIPES])
def recipe(request) -> Path:
    return request.param


@cache
def parse(path: Path, *flags: str):
    # A machine without a GPU refuses bf16 unless it is told to use its CPU.
    return parse_arguments(["--config", str(path), "--use_cpu", "true", *flags])


def test_there_is_a_recipe_for_each_row_of_the_papers_tables():
    rows = {(task, f"{name.split('/')[1].lower()}-{backbone}") for task, name in MODELS for backbone in BACKBONES}
    rows.remove(("math", "qwen3-8b-grpo"))  # the paper trained Qwen3-8B with DAPO only
    assert {(path.parent.name, path.stem) for path in RECIPES} == rows


def test_says_what_the_paper_says_and_marks_the_rest_as_ours(recipe):
    values = yaml.safe_load(recipe.read_text())
    paper = paper_settings(recipe)
    marked = {}
    for line in recipe.read_text().splitlines():
        if match := re.match(r"(\w+):[^#]*(#.*)?$", line):
            marked[match[1]] = (match[2] or "").startswith("# ours")
    assert set(marked) == set(values)  # flat: each line a field
    assert {name: values.get(name) for name in paper} == paper
    assert {name for name, ours in marked.items() if not ours} == set(paper)


def test_parses_into_the_three_dataclasses(recipe):
    script_args, args, model_args = parse(recipe)
    values = yaml.safe_load(recipe.read_text())
    for name, value in values.items():
        holder = next(holder for holder in (script_args, args, model_args) if hasattr(holder, name))
        assert getattr(holder, name) == value, name
    assert args.use_vllm and args.vllm_mode == "colocate"
    assert args.output_dir == f"out/{recipe.stem}"


@pytest.mark.parametrize("selection", ["entropy", "none"])
def test_one_flag_chooses_the_papers_other_arms(recipe, selection):
    script_args, args, _ = parse(recipe, "--token_selection", selection, "--dataset_name", "rows.jsonl")
    assert args.token_selection == selection
    assert args.top_entropy_quantile == 1.0  # TRL's own entropy mask stays out of it
    assert script_args.dataset_name == "rows.jsonl"  # the command line beats the recipe


def test_adds_up_on_eight_gpus(recipe):
    _, args, model_args = parse(recipe)
    prompts, prompts_a_step, longest_prompt, longest_answer, _ = MODELS[
        recipe.parent.name, model_args.model_name_or_path
    ]
    micro_batch = GPUS * args.per_device_train_batch_size
    assert args.generation_batch_size == prompts * args.num_generations
    assert args.generation_batch_size % micro_batch == 0
    steps_per_generation = args.generation_batch_size // micro_batch
    assert micro_batch * args.gradient_accumulation_steps == prompts_a_step * args.num_generations
    # What GMTSGRPOConfig asks for, which it checks at the number of processes it is built with.
    assert steps_per_generation % args.gradient_accumulation_steps == 0
    optimizer_steps = steps_per_generation // args.gradient_accumulation_steps
    assert optimizer_steps == prompts // prompts_a_step
    # A checkpoint within a generation batch would resume with prompts repeated or skipped.
    assert args.save_steps % optimizer_steps == 0
    # vLLM holds a prompt and its answer, but for the one model whose positions end before the paper's lengths do.
    assert args.vllm_max_model_length == (32768 if recipe.parent.name == "code" else longest_prompt + longest_answer)


def test_the_comment_is_right_about_the_batch(recipe):
    text = recipe.read_text()
    _, args, _ = parse(recipe)
    prompts = args.generation_batch_size // args.num_generations
    assert f"Batch: {prompts} prompts x {args.num_generations} answers = {args.generation_batch_size} answers" in text
    answers, accumulation, total, step_prompts, steps, rows, batches, total_steps = map(
        int,
        re.search(
            r"Optimizer step: (\d+) answers x (\d+) micro-batches x 8 GPUs = (\d+) answers = (\d+) prompts x 16; (\d+) "
            r"steps? a generation batch\..*?One epoch: (\d+) prompts, (\d+) whole batches, (\d+) steps",
            text,
            re.DOTALL,
        ).groups(),
    )
    assert (answers, accumulation) == (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert total == answers * accumulation * GPUS == step_prompts * args.num_generations
    assert steps == prompts // step_prompts
    assert (batches, total_steps) == (rows // prompts, rows // prompts * steps)
    assert f"--config examples/recipes/{recipe.parent.name}/{recipe.name}" in text
