"""Watch a policy learn a verifiable task with GMTS, on a CPU, in about two minutes.

    python examples/quickstart.py

The task is reasoning-gym's three-digit addition with written working. The policy, small enough for a CPU, first imitates a
careless demonstrator for half a minute; GRPO then trains it on a fifth of its tokens, those that GMTS selects, until most
of its sampled answers to problems it has not seen are right.

What this shows: the trainer at work from end to end, and what it selects. What it does not show: that GMTS is better than
GRPO. The demonstrator's habits (stopping early, slipping by one) put the policy's doubt into a few known tokens, so
selection by entropy has to find them: a positive control, not evidence about natural language models.

`--model smollm2` trains SmolLM2-135M-Instruct with LoRA on products of two digits instead. There the doubt is its own, but
with 61 questions to train on, and part of the gain is learning to come to the point within 16 tokens.

Every field of `GMTSGRPOConfig` works on the command line and in a YAML file (`--config`); `RECIPES` below holds only the
defaults.

    python examples/quickstart.py --token_selection entropy --selection_ratio 0.5
    python examples/quickstart.py --model smollm2     # a pretrained model with LoRA, about five minutes
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import psutil
import torch
from datasets import Dataset
from transformers.trainer_callback import ProgressCallback
from transformers.utils.logging import disable_progress_bar
from trl import TrlParser, maybe_apply_chat_template

from quickstart_display import GMTSProgressCallback, console, save_reward_plot, show_answers, show_kept_tokens
from quickstart_policies import Problem, Start, smollm2_start, tiny_start
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


STARTS = {"tiny": tiny_start, "smollm2": smollm2_start}
COMMON = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **COMMON,
        "output_dir": "out/quickstart",
        "bf16": False,
        "per_device_train_batch_size": 128,  # 16 problems, 8 answers each
        "num_generations": 8,
        "max_completion_length": 36,
        "learning_rate": 4e-4,
        "warmup_steps": 10,
        "max_steps": 120,
    },
    "smollm2": {
        **COMMON,
        "output_dir": "out/quickstart-smollm2",
        "bf16": True,
        "per_device_train_batch_size": 32,  # 4 problems, 8 answers each
        "num_generations": 8,
        "max_completion_length": 16,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "max_steps": 16,
    },
}
SMOKE = {"max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 16}


@dataclass
class ScriptArguments:
    model: Literal["tiny", "smollm2"] = field(
        default="tiny",
        metadata={"help": "'tiny': built and warmed up by the script. 'smollm2': SmolLM2-135M-Instruct with LoRA."},
    )
    smoke: bool = field(default=False, metadata={"help": "Two steps of everything, to see that it runs."})


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # about renames, to TRL
    disable_progress_bar()  # of loading and saving, not of training
    script_args, args = parse_arguments()
    start = STARTS[script_args.model](args.seed, script_args.smoke)

    def correct(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [start.score(text, result) for text, result in zip(texts, answer, strict=True)]

    trainer = GMTSGRPOTrainer(
        model=start.model,
        processing_class=start.tokenizer,
        reward_funcs=correct,
        args=args,
        train_dataset=Dataset.from_list(start.train),
        peft_config=lora() if start.lora else None,
    )
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(GMTSProgressCallback)

    before = evaluate(trainer, start)
    console.print(f"Held-out accuracy before: {before}")
    trainer.train()
    after = evaluate(trainer, start)
    report(trainer, start, before, after)
    save(trainer, before, after)


def parse_arguments() -> tuple[ScriptArguments, GMTSGRPOConfig]:
    """The recipe of the model asked for, overridden by a YAML file (`--config`) and then by the command line."""
    script_args, _ = TrlParser(ScriptArguments, add_help=False).parse_args_and_config(return_remaining_strings=True)
    recipe = RECIPES[script_args.model] | (SMOKE if script_args.smoke else {})
    parser = TrlParser((ScriptArguments, GMTSGRPOConfig))
    parser.set_defaults_with_config(**recipe)
    return parser.parse_args_and_config()


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


# Before and after


@dataclass
class Evaluation:
    greedy: float
    """Accuracy on the held-out problems, taking the likeliest token each time."""
    sampled: float
    """Accuracy of answers sampled at temperature 1, as in training."""
    answers: list[str]
    """One of the sampled answers to each problem."""
    correct: list[bool]
    """Whether it is right."""

    def __str__(self) -> str:
        return f"greedy {self.greedy:.2f}, sampled {self.sampled:.2f}"


def evaluate(trainer: GMTSGRPOTrainer, start: Start) -> Evaluation:
    greedy = answer(trainer, start, start.held_out, do_sample=False)
    repeated = start.held_out * start.samples_per_problem
    sampled = answer(trainer, start, repeated, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    correct = are_correct(start, sampled, repeated)
    return Evaluation(fmean(are_correct(start, greedy, start.held_out)), fmean(correct), sampled, correct)


@torch.no_grad()
def answer(trainer: GMTSGRPOTrainer, start: Start, problems: list[Problem], **generation: Any) -> list[str]:
    tokenizer, model = start.tokenizer, trainer.model.eval()
    prompts = [maybe_apply_chat_template({"prompt": p["prompt"]}, tokenizer)["prompt"] for p in problems]
    answers = []
    for batch in batched(prompts, trainer.args.per_device_train_batch_size):
        inputs = tokenizer(
            batch, padding=True, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False
        ).to(model.device)
        outputs = model.generate(**inputs, max_new_tokens=trainer.args.max_completion_length, **generation)
        answers += tokenizer.batch_decode(outputs[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    return answers


def batched(items: list[str], size: int) -> Iterator[list[str]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def are_correct(start: Start, answers: list[str], problems: list[Problem]) -> list[bool]:
    return [start.score(text, p["answer"]) == 1 for text, p in zip(answers, problems, strict=True)]


def report(trainer: GMTSGRPOTrainer, start: Start, before: Evaluation, after: Evaluation) -> None:
    console.print(f"Held-out accuracy after:  {after}\n")
    console.print("Sampled answers to held-out problems, before and after:")
    questions = [problem["question"] for problem in start.held_out[:6]]
    show_answers(questions, (before.answers, before.correct), (after.answers, after.correct))
    if trainer.last_selection is not None:
        console.print()
        show_kept_tokens(trainer.last_selection, start.tokenizer)


def save(trainer: GMTSGRPOTrainer, before: Evaluation, after: Evaluation) -> None:
    """The model (LoRA merged into it), its tokenizer and `reward.png`, in the output directory."""
    folder = Path(trainer.args.output_dir)
    model = trainer.model.merge_and_unload() if hasattr(trainer.model, "merge_and_unload") else trainer.model
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    save_reward_plot(folder / "reward.png", trainer.state.log_history, before.sampled, after.sampled)
    seconds = time.time() - psutil.Process().create_time()
    console.print(f"\nThe model, its tokenizer and reward.png are in {folder}. It took {seconds:.0f} s.")


if __name__ == "__main__":
    main()
