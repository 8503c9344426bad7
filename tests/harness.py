"""Runs a real trainer on fixed rollouts and records what it saw and what it did.

Everything goes through the public face: a trainer class, a config, `.train()`. `Recorder` only listens, except where a
test hands it `inject`, which edits the generated batch right after TRL built it (as if the rollouts had come with these
old log-probs, advantages, ...). `Run.steps` then holds, for every optimizer step, the micro-batches TRL handed to the
loss, the weights they met, and the gradient that reached the optimizer.
"""

import random
from dataclasses import dataclass, field
from functools import cache

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


PAD, EOS, UNK = 0, 1, 2
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789 "
PROMPTS = ["a", "bcd ef", "0123456789 ab", "zyx"]  # four lengths: the batch has padding on the left
NUM_GENERATIONS = 4
ROWS = len(PROMPTS) * NUM_GENERATIONS  # 16 answers in an optimizer step, however it is cut


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Characters; pad is not eos, so an answer that ends is told from one that was cut."""
    vocab = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK} | {char: 3 + i for i, char in enumerate(CHARS)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def policy_config(dropout: float = 0.0) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.35,  # wide: entropies from near 0 to near log(vocabulary), not all alike
        attention_dropout=dropout,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def save_policy(folder, seed: int = 0) -> str:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(policy_config()).double()
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return str(folder)


def load_policy(folder: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attention_dropout=dropout)


def dataset(prompts: list[str] = PROMPTS, copies: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": prompts * copies})


class FixedRollouts:
    """Answers that depend only on (prompt, index in its group, round): 1 to `longest` tokens, most end with eos."""

    def __init__(self, longest: int = 14, answers=None, tool_tokens: bool = False, logprobs=None):
        self.longest = longest
        self.answers = answers  # (prompt, index, round) -> token ids
        self.tool_tokens = tool_tokens
        self.logprobs = logprobs  # completion ids -> one float or None for each
        self.round = 0

    def answer(self, prompt: str, index: int) -> list[int]:
        if self.answers is not None:
            return self.answers(prompt, index, self.round)
        rng = random.Random(f"{prompt}/{index}/{self.round}")
        length = rng.randint(0, self.longest - 1)
        ids = [rng.randrange(3, 3 + len(CHARS)) for _ in range(length)]
        return [*ids, EOS] if rng.random() < 0.8 or not ids else ids

    def __call__(self, prompts: list[str], trainer) -> dict:
        seen: dict[str, int] = {}
        completions = []
        for prompt in prompts:
            index = seen.get(prompt, 0)
            seen[prompt] = index + 1
            completions.append(self.answer(prompt, index))
        self.round += 1
        output = {
            "prompt_ids": [tokenizer()(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": None if self.logprobs is None else [self.logprobs(ids) for ids in completions],
        }
        if self.tool_tokens:  # TRL's name for "the model wrote this": 0 for two tokens inside each longer answer
            output["env_mask"] = [[int(not 2 <= i < 4) for i in range(len(ids))] for ids in completions]
        return output


def spread_reward(completion_ids, **kwargs) -> list[float]:
    """Fixed by the answer. Squared, so that no advantage of a group is minus another, but for its rounding."""
    return [((sum(i * token for i, token in enumerate(ids, 1)) % 11) / 11) ** 2 for ids in completion_ids]


def half_flat_reward(prompts, completion_ids, **kwargs) -> list[float]:
    """As `spread_reward`, but two of the four prompts reward all their answers alike: advantages of zero."""
    spread = spread_reward(completion_ids)
    return [0.5 if prompt in PROMPTS[:2] else reward for prompt, reward in zip(prompts, spread, strict=True)]


def flat_reward(completion_ids, **kwargs) -> list[float]:
    return [1.0] * len(completion_ids)


@torch.no_grad()
def policy_logps(trainer, batch: dict) -> torch.Tensor:
    """float64 (B, T): log-probs of the answers under the current policy, from its logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].size(1)
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].double()
    log_p = torch.log_softmax(logits / trainer.temperature, dim=-1)
    return log_p.gather(2, batch["completion_ids"][:, :, None]).squeeze(2)


def noise(batch: dict, seed: int) -> torch.Tensor:
    """float64 (B, T): standard normal, the same for a token however wide the batch is padded."""
    rows, width = batch["completion_ids"].shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 64, generator=generator, dtype=torch.float64)[:, :width]


def off_policy(old: float = 0.0, ref: float = 0.0):
    """Injects old (and reference) log-probs that lie this far, in standard deviations, from the policy's."""

    def inject(trainer, batch):
        logps = policy_logps(trainer, batch)
        batch = dict(batch)
        if old:
            batch["old_per_token_logps"] = logps + old * noise(batch, 1)
        if ref:
            batch["ref_per_token_logps"] = logps + ref * noise(batch, 2)
        return batch

    return inject


@dataclass
class Step:
    """One optimizer step."""

    micro_batches: list[dict]
    weights: dict[str, torch.Tensor]
    gradient: torch.Tensor
    metrics: dict[str, list[float]] = field(default_factory=dict)  # TRL's own lists, before it averages them


@dataclass
class Run:
    trainer: GRPOTrainer
    steps: list[Step]
    generated: list[dict]
    forwards: list[dict]
    losses: list[torch.Tensor]

    @property
    def gradient(self) -> torch.Tensor:
        return self.steps[0].gradient

    @property
    def logs(self) -> list[dict]:
        return [entry for entry in self.trainer.state.log_history if "loss" in entry]


def flat_gradient(model) -> torch.Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten().double()
            for p in model.parameters()
            if p.requires_grad
        ]
    )


def flat_parameters(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def copied(batch: dict) -> dict:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in batch.items()}


class Listener(TrainerCallback):
    def __init__(self, record: Run):
        self.record = record

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.record.steps.append(
            Step(
                micro_batches=self.record.trainer.pending,
                weights={name: value.detach().clone() for name, value in model.state_dict().items()},
                gradient=flat_gradient(model),
            )
        )
        self.record.trainer.pending = []


@cache
def recording(trainer_class: type) -> type:
    """`trainer_class` that keeps what passes through it."""

    class Recorder(trainer_class):
        record: Run
        pending: list[dict]
        inject = None

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if self.inject is not None:
                batch = self.inject(self, batch)
            self.record.generated.append(copied(batch))
            return batch

        def _prepare_inputs(self, generation_batch):
            batch = super()._prepare_inputs(generation_batch)
            if self.model.training:
                self.pending.append(copied(batch))
            return batch

        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.record.losses.append(loss.detach().clone())
            return loss

        def log(self, logs, start_time=None):
            if self.model.training and self.record.steps and "loss" in logs:
                metrics = {name: list(values) for name, values in self._metrics["train"].items()}
                self.record.steps[-1].metrics = metrics
            super().log(logs, start_time)

    Recorder.__name__ = trainer_class.__name__
    return Recorder


def config_arguments(config_class=GRPOConfig, rows: int = ROWS, **overrides) -> dict:
    """The settings all runs share. `rows`: the micro-batch; the optimizer step is 16 answers unless overridden."""
    arguments = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 1,
        "num_generations": NUM_GENERATIONS,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": ROWS // rows,
        "max_completion_length": 16,
        "shuffle_dataset": False,
        "optim": "sgd",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # no clipping: the recorded gradient is the accumulated one
        "seed": 0,
    }
    return arguments | overrides


def run(
    trainer_class=None,
    *,
    model,
    output_dir,
    rollouts=None,
    tool_tokens: bool = False,
    reward=spread_reward,
    inject=None,
    prompts=PROMPTS,
    sampled: bool = False,
    watch_forwards: bool = False,
    train: bool = True,
    trainer_arguments: dict | None = None,
    **config,
) -> Run:
    """
    Build a trainer and train it.

    Args:
        trainer_class: `GMTSGRPOTrainer` when None. With `GRPOTrainer` the config is a plain `GRPOConfig`.
        rollouts: a `FixedRollouts` of this run's own, since it counts its rounds.
        inject: `(trainer, generated batch) -> generated batch`.
        sampled: let the model sample its answers instead of using fixed rollouts.
        watch_forwards: record the arguments of every forward of the decoder that carries gradient.
        config: fields of the config, over those of `config_arguments`.
    """
    from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer

    trainer_class = GMTSGRPOTrainer if trainer_class is None else trainer_class
    config_class = GMTSGRPOConfig if issubclass(trainer_class, GMTSGRPOTrainer) else GRPOConfig
    args = config_class(output_dir=output_dir, **config_arguments(**config))
    kwargs = dict(trainer_arguments or {})
    if not sampled:
        kwargs["rollout_func"] = FixedRollouts(tool_tokens=tool_tokens) if rollouts is None else rollouts
    trainer = recording(trainer_class)(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=dataset(prompts),
        processing_class=tokenizer(),
        **kwargs,
    )
    record = Run(trainer=trainer, steps=[], generated=[], forwards=[], losses=[])
    trainer.record, trainer.pending, trainer.inject = record, [], inject
    trainer.add_callback(Listener(record))
    if watch_forwards:
        decoder = trainer.accelerator.unwrap_model(trainer.model).base_model

        def see(module, args, kwargs):
            if torch.is_grad_enabled() and trainer.model.training:
                seen = dict(zip(("input_ids", "attention_mask", "position_ids"), args, strict=False)) | kwargs
                record.forwards.append({k: v.clone() if torch.is_tensor(v) else v for k, v in seen.items()})

        decoder.register_forward_pre_hook(see, with_kwargs=True)
    if train:
        trainer.train()
    return record


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, and the expected one is not nothing."""
    assert expected.norm() > 1e-4, f"the reference is too small to compare with: {expected.norm():.2e}"
    return ((found - expected).norm() / expected.norm()).item()
