"""A policy for the three domains that a CPU makes in seconds, and local files of problems that it half solves.

A two-layer model and a byte-level tokenizer, both built in code, imitate a demonstrator who is right half the time: so
groups of sampled answers disagree, and there is something to train on.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trl_gmts.tasks import get_task


ROOT = Path(__file__).parents[1]
DOMAINS = ("math", "commonsense", "code")
WORDS = ["apple", "river", "hammer", "violin", "cloud"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rows_of(domain: str) -> list[dict]:
    """
    Eight problems in the columns of the hub's data sets. Each domain has two right answers, so that also a policy that has
    not learned to read the question is right now and then.
    """
    if domain == "math":
        return [{"problem": f"What is {a} + {total - a}?", "answer": str(total)} for a in range(4) for total in (7, 9)]
    if domain == "commonsense":
        choices = {"label": list("ABCDE"), "text": WORDS}
        return [
            {"question": f"Which is the {WORDS['AB'.index(key)]}, {i}?", "choices": choices, "answerKey": key}
            for i in range(4)
            for key in "AB"
        ]
    return [
        {"question": f"Write f(x), x plus {n}, example {i}.", "tests": f"assert f(1) == {n + 1}"}
        for i in range(4)
        for n in (1, 2)
    ]


def demonstration(domain: str, row: dict, right: bool) -> str:
    if domain == "math":
        return rf"\boxed{{{int(row['answer']) + (not right)}}}"
    if domain == "commonsense":
        return rf"\boxed{{{row['answerKey'] if right else 'F'}}}"
    n = int(row["tests"].split()[-1]) - 1
    return f"```python\ndef f(x):\n    return x {'+' if right else '-'} {n}\n```"


def write_rows(folder: Path, domain: str, copies: int = 1) -> Path:
    path = folder / f"{domain}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(domain) * copies))
    return path


def save_tiny_policy(folder: Path, steps: int = 120) -> Path:
    examples = [(domain, row) for domain in DOMAINS for row in rows_of(domain)]
    prompts = {id(row): get_task(domain).example(row)["prompt"] for domain, row in examples}
    answers = [demonstration(domain, row, right) for domain, row in examples for right in (True, False)]
    tokenizer = byte_tokenizer([prompt[0]["content"] for prompt in prompts.values()] + answers)
    model = small_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rng = random.Random(0)
    for _ in range(steps):
        batch = rng.choices(examples, k=24)
        given = [
            tokenizer.apply_chat_template(prompts[id(row)], add_generation_prompt=True, tokenize=False)
            for _, row in batch
        ]
        texts = [
            text + demonstration(domain, row, rng.random() < 0.5) + "<eos>"
            for text, (domain, row) in zip(given, batch, strict=True)
        ]
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
        for i, text in enumerate(given):
            labels[i, : len(tokenizer(text).input_ids)] = -100
        model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<user>", "<assistant>"]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def script_environment(folder: Path) -> dict[str, str]:
    """For a script of examples/ in a process of its own: one thread, no hub, its caches in the test's folder."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


if __name__ == "__main__":
    print(save_tiny_policy(Path(sys.argv[1])))
