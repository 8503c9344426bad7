"""What an optimizer step costs after generation and rewards: GMTS beside plain GRPO, in one run.

Every arm is a real trainer that trains on the same synthetic answers; the arms take turns, so that a machine that slows
down slows all of them. Each row is a median over the turns and its ratio to plain `GRPOTrainer` in the same turn. The
policy is warmed up for a few seconds on a random grammar in which a third of the tokens have several continuations, because
a policy from random weights has the same entropy everywhere, and real ones do not.

What it does not measure: generation and rewards, which selection leaves as they are.

    python examples/benchmarks/step_time.py
    python examples/benchmarks/step_time.py --device cuda --model-size 0.5b --answers 64 --max-answer 1024
"""

import argparse
import ctypes
import logging
import os
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


PAD, EOS = 0, 1
GRAMMAR_TOKENS = 30  # of the vocabulary, those that prompts and answers are made of
GROUP = 8

MODELS = {
    "9m": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16_000,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    ),
    "0.5b": lambda: Qwen2ForCausalLM(  # the shape of Qwen2.5-0.5B
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    ),
}


@dataclass
class Grammar:
    """From two tokens in three one token follows; from the third, one of eight."""

    rng: random.Random
    following: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token in range(GRAMMAR_TOKENS):
            self.following.append([self.rng.randrange(GRAMMAR_TOKENS) for _ in range(8 if token % 3 == 0 else 1)])

    def text(self, length: int) -> list[int]:
        tokens = [self.rng.randrange(GRAMMAR_TOKENS)]
        while len(tokens) < length:
            tokens.append(self.rng.choice(self.following[tokens[-1]]))
        return [2 + token for token in tokens]


def warmed_up(size: str, grammar: Grammar, device: str, steps: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[size]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if size == "9m" else 3e-4)
    autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu")
    for _ in range(steps):
        tokens = torch.tensor([grammar.text(64) for _ in range(8)], device=device)
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@dataclass
class Answers:
    """A generation batch: prompts, answers of log-normal length, binary rewards, some groups all alike."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float]


def synthetic_answers(grammar: Grammar, answers: int, longest: int, flat_share: float) -> Answers:
    groups = answers // GROUP
    prompts = [grammar.text(grammar.rng.randint(15, 40)) for _ in range(groups)]
    lengths = [
        min(longest, max(2, round(longest / 2.56 * grammar.rng.lognormvariate(0, 0.5)))) for _ in range(answers)
    ]
    completions = [[*grammar.text(length - 1), EOS] for length in lengths]
    rewards = []
    for group in range(groups):
        correct = grammar.rng.randint(1, GROUP - 1)
        group_rewards = [1.0] * correct + [0.0] * (GROUP - correct)
        grammar.rng.shuffle(group_rewards)
        rewards += [1.0] * GROUP if group < round(flat_share * groups) else group_rewards
    return Answers([prompt for prompt in prompts for _ in range(GROUP)], completions, rewards)


class StepTimer(TrainerCallback):
    """Seconds and peak memory of the optimizer step of a `train()`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.peaks: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.floor = reset_peak(self.device)
        self.began = now(self.device)

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(now(self.device) - self.began)
        self.peaks.append(peak(self.device) - self.floor)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> float:
    """Start to watch for the highest memory use; the use now, in MiB."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    if sys.platform != "linux":
        return float("nan")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resident("VmHWM") if sys.platform == "linux" else float("nan")


def resident(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status).group(1)) / 1024


class MeasuredGMTS(GMTSGRPOTrainer):
    """Also notes how long a step is planned outside of the model's forward: TRL's loss, ranking, thresholds, packing."""

    def __init__(self, *args, **kwargs):
        self.outside: list[float] = []
        super().__init__(*args, **kwargs)

    def _plan_step(self, model, inputs):
        self.forward_seconds = 0.0
        began = now(self.accelerator.device.type)
        plan = super()._plan_step(model, inputs)
        self.outside.append(now(self.accelerator.device.type) - began - self.forward_seconds)
        return plan

    def _scoring_forwards(self, *args):
        began = now(self.accelerator.device.type)
        forwards = super()._scoring_forwards(*args)
        self.forward_seconds = now(self.accelerator.device.type) - began
        return forwards


ARMS = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, {}),
    "GRPOTrainer, top_entropy_quantile=0.2": (GRPOTrainer, GRPOConfig, {"top_entropy_quantile": 0.2}),
    "GMTS": (MeasuredGMTS, GMTSGRPOConfig, {}),
    "GMTS, skip_unselected=False": (MeasuredGMTS, GMTSGRPOConfig, {"skip_unselected": False}),
}


def build(arm: str, model, tokenizer, answers: Answers, old_logps: bool, options: argparse.Namespace, folder: str):
    trainer_class, config_class, extra = ARMS[arm]

    def rollouts(prompts, trainer):
        ids = {"prompt_ids": answers.prompts, "completion_ids": answers.completions, "logprobs": None}
        return {name: value if value is None else [list(row) for row in value] for name, value in ids.items()}

    def reward(completions, **kwargs):
        return answers.rewards

    cuda = options.device == "cuda"
    args = config_class(
        output_dir=folder,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.answers // options.micro_batch,
        num_generations=GROUP,
        # A batch that is used twice outlives an update, which makes TRL compute the old log-probs.
        num_iterations=2 if old_logps else 1,
        max_steps=1,
        max_completion_length=options.max_answer,
        learning_rate=0.0,  # every turn meets the same policy
        shuffle_dataset=False,
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        **extra,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{i}" for i in range(options.answers)]}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    timer = StepTimer(options.device)
    trainer.add_callback(timer)
    trainer.remove_callback(PrinterCallback)
    return trainer, timer


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    vocab = {"<pad>": PAD, "<eos>": EOS} | {str(i): i for i in range(2, size)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


@torch.no_grad()
def entropy_statistics(model, answers: Answers) -> str:
    entropies = []
    for prompt, completion in list(zip(answers.prompts, answers.completions, strict=True))[:8]:
        ids = torch.tensor([prompt + completion], device=model.device)
        logp = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        entropies.append(-(logp.exp() * logp).sum(-1))
    entropy = torch.cat(entropies)
    return f"median entropy {entropy.median():.3f} nats, {(entropy > 0.5).float().mean():.0%} above 0.5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model-size", choices=list(MODELS), default="9m")
    parser.add_argument("--answers", type=int, default=32, help="answers in an optimizer step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--max-answer", type=int, default=256, help="tokens; the median is 1 / 2.56 of it")
    parser.add_argument("--flat-shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=150, help="steps of supervised training of the policy")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)

    grammar = Grammar(random.Random(0))
    model = warmed_up(options.model_size, grammar, options.device, options.warm_up)
    tokenizer = tokenizer_of(model.config.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, vocabulary {model.config.vocab_size:,}, {options.device}, "
        f"{torch.get_num_threads()} threads, {options.answers} answers of at most {options.max_answer} tokens in "
        f"micro-batches of {options.micro_batch}, {options.repeats} turns; torch {torch.__version__}"
    )
    print(entropy_statistics(model, synthetic_answers(grammar, options.answers, options.max_answer, 0.0)), flush=True)
    print("\n| groups without advantage | old log-probs | arm | seconds | ratio | peak memory, MiB | planning |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for flat_share in options.flat_shares:
            answers = synthetic_answers(grammar, options.answers, options.max_answer, flat_share)
            for old_logps in (False, True):
                arms = {arm: build(arm, model, tokenizer, answers, old_logps, options, folder) for arm in ARMS}
                for turn in range(options.repeats + 1):
                    for trainer, timer in arms.values():
                        trainer._step = 0  # each turn begins with a generation, though the last batch is not used up
                        trainer.train()
                        if turn == 0:  # the first turn only warms up caches
                            timer.seconds.clear()
                            timer.peaks.clear()
                baseline = arms["GRPOTrainer"][1].seconds
                for arm, (trainer, timer) in arms.items():
                    ratio = statistics.median(a / b for a, b in zip(timer.seconds, baseline, strict=True))
                    planning = ""
                    if isinstance(trainer, MeasuredGMTS):
                        outside = trainer.outside[1:]
                        share = statistics.median(a / b for a, b in zip(outside, timer.seconds, strict=True))
                        planning = f"{share:.1%}"
                    print(
                        f"| {flat_share:.0%} | {'yes' if old_logps else 'no'} | {arm} | "
                        f"{statistics.median(timer.seconds):.2f} | {ratio:.2f} | {statistics.median(timer.peaks):.0f} | "
                        f"{planning} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
