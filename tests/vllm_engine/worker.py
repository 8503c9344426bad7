"""What each process runs: one training with a vLLM engine inside it; all that it saw goes into one file."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from harness import EOS, PAD, ROWS, load_policy, policy_config, run, tokenizer


STEPS = 4
MICRO_BATCHES = 4  # of an optimizer step
RATIO = 0.2
LEARNING_RATE = 1e-2  # Adam: one step changes log-probs by more than 1
LORA = {"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 32, "target_modules": "all-linear"}


def prepare_engine() -> None:
    """
    Two things that vLLM does on CPUs only, and that would be in the way, are turned off before it starts.

    It packs the weights of linear layers for its own kernels and empties the parameters that TRL's weight sync writes
    to. And it runs float32 models in bfloat16, with no field in TRL's config to say otherwise; in bfloat16 log-probs
    differ by a hundredth anyway, and little could be told from that.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers
    from vllm.platforms.cpu import CpuPlatform

    # Names that vLLM has dropped could be set all the same, without effect
    assert hasattr(ops, "_supports_onednn") and hasattr(layers, "check_cpu_sgl_kernel")
    assert torch.float32 in CpuPlatform().supported_dtypes
    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda n, k, dtype: False
    CpuPlatform.supported_dtypes = [torch.float32]


def engine_policy_config() -> Qwen3Config:
    config = policy_config()
    config.head_dim = 32  # vLLM's attention kernels want it this wide
    return config


def save_policy(folder: Path) -> str:
    """vLLM loads model and tokenizer from where the policy came from."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(engine_policy_config())
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


class Watcher(TrainerCallback):
    """Listens to the policy and to the selection. The engine has a model of its own, which is not listened to."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.forwards: list[tuple[int, bool]] = []
        self.selections: list[dict] = []
        trainer.accelerator.unwrap_model(trainer.model).get_decoder().register_forward_pre_hook(self.see)

    def see(self, *_):
        self.forwards.append((self.trainer.state.global_step, torch.is_grad_enabled()))

    def on_step_end(self, args, state, control, **kwargs):
        selection = self.trainer.last_selection
        self.selections.append({"mask": selection.mask, "kept": selection.kept})


def train(weights: str, synced: bool, folder: Path) -> dict:
    found = run(
        model=load_policy(save_policy(folder / "policy"), dtype=torch.float32),
        output_dir=str(folder / "run"),
        sampled=True,
        train=False,
        rows=ROWS // MICRO_BATCHES,
        max_steps=STEPS,
        selection_ratio=RATIO,
        optim="adamw_torch",
        learning_rate=LEARNING_RATE,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=128,
        trainer_arguments={"peft_config": LoraConfig(**LORA)} if weights == "lora" else None,
    )
    generation = found.trainer.vllm_generation
    if not synced:
        generation.sync_weights = lambda: None
    watcher = Watcher(found.trainer)
    found.trainer.add_callback(watcher)
    found.trainer.train()
    model = generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    return {
        "engine": type(generation.llm).__module__,
        "engine_dtypes": {parameter.dtype for parameter in model.parameters()},
        "generated": found.generated,
        "steps": found.steps,
        "logs": found.logs,
        "forwards": watcher.forwards,
        "selections": watcher.selections,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", choices=["full", "lora"], required=True)
    parser.add_argument("--without-sync", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    prepare_engine()
    outcome = train(options.weights, not options.without_sync, options.out)
    torch.save(outcome, options.out / "outcome.pt")


if __name__ == "__main__":
    main()
