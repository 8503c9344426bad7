"""Train a language model with GMTS on verifiable problems: math, commonsense or code.

    accelerate launch --config_file zero2.yaml examples/train.py --config examples/recipes/math/qwen2.5-math-1.5b-dapo.yaml
    python examples/train.py --config recipe.yaml --token_selection entropy --output_dir out/entropy

Every field of `GMTSGRPOConfig` and of TRL's `ModelConfig` (LoRA, quantisation) works in the YAML file and on the command
line, which wins. The file reads from top to bottom as what it does: arguments, prompts, trainer, train, save.

Left to others: how a row becomes a prompt and what an answer is worth (`trl_gmts.tasks`); everything about training
(`trl_gmts`, TRL). For a task of your own, docs/tutorials/your-own-task.md is shorter than changing this file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import get_soft_overlong_punishment

from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer
from trl_gmts.tasks import Task, get_task


@dataclass
class TrainArguments(ScriptArguments):
    """TRL's `ScriptArguments` (`dataset_name`, `dataset_config`, `dataset_train_split`, ...) and the fields below."""

    task: str | None = field(
        default=None,
        metadata={"help": "What the rows are: 'math', 'commonsense' or 'code'. Gives the prompt and the reward."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "A dataset on the hub, or a local .jsonl, .json or .parquet file."}
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Leave out rows whose prompt is longer than this, in tokens."}
    )
    soft_overlong_cache: int = field(
        default=0,
        metadata={
            "help": "DAPO's overlong shaping: a penalty that grows from 0 to 1 over the last so many tokens before "
            "max_completion_length. 0 switches it off."
        },
    )
    sandbox: Literal["bubblewrap", "rlimits"] = field(
        default="bubblewrap",
        metadata={
            "help": "Code: what holds the answers that are run. 'rlimits' is weaker, for machines where bubblewrap "
            "cannot work; see docs/tasks.md."
        },
    )


def main(arguments: list[str] | None = None) -> None:
    script_args, args, model_args = parse_arguments(arguments)
    task = named_task(script_args.task, script_args.sandbox)
    model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    args.model_init_kwargs = model_init_kwargs | (args.model_init_kwargs or {})

    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=args.trust_remote_code,
    )
    with args.main_process_first(desc="dataset"):  # the others read what it cached
        train_dataset = prompts(script_args, script_args.dataset_train_split, task, tokenizer, args)
        eval_dataset = None
        if args.eval_strategy != "no":
            eval_dataset = prompts(script_args, script_args.dataset_test_split, task, tokenizer, args)

    trainer = GMTSGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward_functions(task, script_args, args),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint(args.resume_from_checkpoint))
    if trainer.state.global_step == 0:
        raise ValueError(
            f"No optimizer step was taken: a generation batch is {args.generation_batch_size // args.num_generations} "
            f"prompts, and the dataset has {len(train_dataset)}: add rows, or make the batch smaller (per_device_train_batch_size, "
            "gradient_accumulation_steps, steps_per_generation)."
        )
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved to {args.output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.accelerator.print(f"Pushed to https://huggingface.co/{trainer.hub_model_id}.")
    # Trackers and the process group end last: gloo (CPUs) can hang at exit if a model outlives its process group.
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()
    accelerator.end_training()


def parse_arguments(arguments: list[str] | None = None) -> tuple[TrainArguments, GMTSGRPOConfig, ModelConfig]:
    parser = TrlParser((TrainArguments, GMTSGRPOConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_and_config(arguments)
    for name, value in (
        ("task", script_args.task),
        ("dataset_name", script_args.dataset_name),
        ("model_name_or_path", model_args.model_name_or_path),
    ):
        if value is None:
            parser.error(f"--{name} is missing: give it on the command line or in the --config file.")
    if not 0 <= script_args.soft_overlong_cache <= args.max_completion_length:
        parser.error(
            f"--soft_overlong_cache ({script_args.soft_overlong_cache}) must lie between 0 and max_completion_length "
            f"({args.max_completion_length})."
        )
    return script_args, args, model_args


def named_task(name: str | None, sandbox: str, **code_options: Any) -> Task:
    return get_task(name, isolation=sandbox, **code_options) if name == "code" else get_task(name)


def prompts(
    script_args: TrainArguments, split: str, task: Task, tokenizer: PreTrainedTokenizerBase, args: GMTSGRPOConfig
) -> Dataset:
    """The rows of a split as the trainer wants them: a prompt, and the columns that the reward reads."""
    dataset = load_rows(script_args.dataset_name, script_args.dataset_config, split)
    dataset = dataset.map(task.example, remove_columns=dataset.column_names, desc=f"Prompts ({split})")
    if script_args.max_prompt_length is None:
        return dataset
    # A question cut short is another question, so long ones are left out whole.
    kept = dataset.filter(
        lambda row: prompt_length(row["prompt"], tokenizer, args) <= script_args.max_prompt_length,
        desc=f"Prompts of at most {script_args.max_prompt_length} tokens",
    )
    if len(kept) == 0:
        raise ValueError(
            f"None of the {len(dataset)} prompts has at most {script_args.max_prompt_length} tokens: raise "
            "max_prompt_length."
        )
    return kept


def load_rows(name: str, config: str | None, split: str) -> Dataset:
    """A dataset of the hub, or a local file, which has one split whatever it is called."""
    suffix = Path(name).suffix
    if suffix in (".jsonl", ".json", ".parquet"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"There is no file {name}. A dataset of the hub is named without a file ending.")
        if Path(name).stat().st_size == 0:
            raise ValueError(f"{name} is empty.")
        return load_dataset("parquet" if suffix == ".parquet" else "json", data_files=name, split="train")
    return load_dataset(name, config, split=split)


def prompt_length(prompt: Any, tokenizer: PreTrainedTokenizerBase, args: GMTSGRPOConfig) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(args.chat_template_kwargs or {})
    )
    return len(encoded["input_ids"])


def reward_functions(task: Task, script_args: TrainArguments, args: GMTSGRPOConfig) -> list[Callable[..., Any]]:
    rewards: list[Callable[..., Any]] = [task.reward]
    if script_args.soft_overlong_cache > 0:
        rewards.append(get_soft_overlong_punishment(args.max_completion_length, script_args.soft_overlong_cache))
    return rewards


def checkpoint(resume_from_checkpoint: str | None) -> str | bool | None:
    """What `Trainer.train` takes: a folder, or True for the last checkpoint in the output folder."""
    return True if resume_from_checkpoint in ("true", "True", "last") else resume_from_checkpoint


if __name__ == "__main__":
    main()
