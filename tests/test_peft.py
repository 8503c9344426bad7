"""Adapters: the gradient of the adapter is that of the kept tokens, with the reference that TRL takes for each setup."""

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from trl import GRPOTrainer

from harness import load_policy, off_policy, relative_error
from listening import listening, selected_coefficients, weighted_gradient
from oracle import LIMIT
from trl_gmts import GMTSGRPOTrainer


KL = {"beta": 0.3, "use_bias_correction_kl": False, "inject": off_policy(old=0.4)}


def lora(**changes) -> LoraConfig:
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    return LoraConfig(task_type="CAUSAL_LM", **(settings | changes))


def adapted(model_dir, spread: float = 0.2, **changes) -> PeftModel:
    """With an adapter that was trained before: its B is not zero."""
    torch.manual_seed(1)
    model = get_peft_model(load_policy(model_dir), lora(**changes), autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=spread)
    return model


def new_adapter(model_dir) -> dict:
    torch.manual_seed(2)  # TRL 1.12 draws the adapter before it seeds
    return {"model": load_policy(model_dir), "trainer_arguments": {"peft_config": lora()}}


def existing_adapter(model_dir) -> dict:
    return {"model": adapted(model_dir)}


def dora(model_dir) -> dict:
    torch.manual_seed(2)
    return {"model": load_policy(model_dir), "trainer_arguments": {"peft_config": lora(use_dora=True)}}


def rank_stabilised_all_linear(model_dir) -> dict:
    torch.manual_seed(2)
    config = lora(use_rslora=True, target_modules="all-linear")
    return {"model": load_policy(model_dir), "trainer_arguments": {"peft_config": config}}


def with_a_saved_module(model_dir) -> dict:
    torch.manual_seed(2)
    config = lora(modules_to_save=["norm"])
    return {"model": load_policy(model_dir), "trainer_arguments": {"peft_config": config}}


ADAPTERS = [new_adapter, existing_adapter, dora, rank_stabilised_all_linear, with_a_saved_module]


def assert_gmts_is_grpo_on_the_kept(run, arguments, limit: float = LIMIT, **options):
    """`arguments()`: a fresh model and its setup for each trainer."""
    plain = run(listening(), rows=4, **arguments(), **options)
    ours = run(GMTSGRPOTrainer, rows=4, **arguments(), **options)
    kept, weights, _ = selected_coefficients(plain)
    model = plain.trainer.model  # its weights have moved; those of the step are put back
    model.load_state_dict(plain.steps[0].weights)
    everything = weighted_gradient(model, plain.steps[0], [logps.grad for logps, _, _ in plain.trainer.heard])
    assert relative_error(everything, plain.gradient) < limit
    assert relative_error(ours.gradient, weighted_gradient(model, plain.steps[0], weights)) < limit
    assert relative_error(ours.gradient, plain.gradient) > 0.1
    assert ours.logs[0]["gmts/kept_tokens"] == sum(int(k.sum()) for k in kept)
    return plain, ours


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__.replace("_", " "))
def test_adapters(run, model_dir, adapter, beta):
    plain, ours = assert_gmts_is_grpo_on_the_kept(run, lambda: adapter(model_dir), **(KL | {"beta": beta}))
    trainable = {name for name, parameter in ours.trainer.model.named_parameters() if parameter.requires_grad}
    assert trainable and all("lora" in name or "modules_to_save" in name for name in trainable)


def test_an_existing_adapter_is_its_own_reference(run, model_dir):
    """TRL keeps a copy of it. Its log-probs, and so the first KL, are the policy's own."""
    options = {"beta": 0.3, "max_steps": 2, "learning_rate": 0.1}
    found = run(rows=4, **existing_adapter(model_dir), **options)
    assert "ref" in found.trainer.model.peft_config
    assert found.logs[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert found.logs[1]["kl"] > 1e-6
    moved = {
        name
        for name in found.steps[0].weights
        if not torch.equal(found.steps[0].weights[name], found.steps[1].weights[name])
    }
    assert moved and not any(".ref." in name for name in moved)


def test_a_new_adapters_reference_is_the_base_model(run, model_dir):
    """Scored with the adapter off: forwards for the reference are not taken for the policy's."""
    options = {"beta": 0.3, "num_iterations": 2, "max_steps": 4, "learning_rate": 0.1}
    plain = run(GRPOTrainer, rows=4, **new_adapter(model_dir), **options)
    ours = run(rows=4, **new_adapter(model_dir), **options, selection_ratio=1.0)
    whole = run(rows=4, **new_adapter(model_dir), **options, skip_unselected=False)
    skipping = run(rows=4, **new_adapter(model_dir), **options)
    for theirs, step in zip(plain.steps, ours.steps, strict=True):
        assert relative_error(step.gradient, theirs.gradient) < 2e-5
    for theirs, step in zip(whole.steps, skipping.steps, strict=True):
        assert relative_error(step.gradient, theirs.gradient) < 2e-5
    assert ours.logs[-1]["kl"] > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_with_gradient_checkpointing(run, model_dir, reentrant):
    plain, ours = assert_gmts_is_grpo_on_the_kept(
        run,
        lambda: new_adapter(model_dir),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        inject=off_policy(old=0.4),
    )
    assert ours.gradient.norm() > 0


def test_lora_without_selection_is_grpo_bit_for_bit(run, model_dir):
    options = {"max_steps": 3, "beta": 0.1, "optim": "adamw_torch", "learning_rate": 1e-2}
    theirs = run(GRPOTrainer, rows=4, **new_adapter(model_dir), **options)
    ours = run(GMTSGRPOTrainer, rows=4, **new_adapter(model_dir), **options, token_selection="none")
    for name, value in theirs.trainer.model.state_dict().items():
        assert torch.equal(value, ours.trainer.model.state_dict()[name]), name


class FourBitLinear(torch.nn.Linear):
    """Sixteen levels for each output, kept as integers and multiplied out in the forward, as a quantised layer does."""

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> "FourBitLinear":
        layer = cls(linear.in_features, linear.out_features, bias=False, dtype=torch.float32)
        scale = linear.weight.detach().float().abs().amax(1, keepdim=True) / 7
        layer.register_buffer("levels", (linear.weight.detach().float() / scale).round().clamp(-8, 7).to(torch.int8))
        layer.register_buffer("scale", scale)
        layer.weight = torch.nn.Parameter((layer.levels * scale), requires_grad=False)
        return layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, (self.levels * self.scale).to(hidden.dtype))


def quantised(model_dir) -> dict:
    """
    What QLoRA hands to the trainer, but for the kernels of bitsandbytes: a frozen base with integer weights, flagged as
    loaded in four bits, prepared as for training, and a new adapter. TRL then casts the adapter to bfloat16.
    """
    model = load_policy(model_dir, dtype=torch.float32)
    for layer in model.model.layers:
        for block, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (layer.mlp, ("up_proj", "gate_proj", "down_proj")),
        ):
            for name in names:
                setattr(block, name, FourBitLinear.of(getattr(block, name)))
    model.is_loaded_in_4bit = True
    torch.manual_seed(2)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return {"model": model, "trainer_arguments": {"peft_config": lora()}}


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="takes no model flagged as 4-bit without bitsandbytes"
)
def test_qlora_shaped(run, model_dir):
    """Ranked and trained in what TRL makes of QLoRA: a quantised base, a bfloat16 adapter."""
    options = {"rows": 4, "bf16": True}  # on policy: no token is near a clip, which rounding could move it across
    plain = run(listening(), **quantised(model_dir), **options)
    same = run(**quantised(model_dir), **options, selection_ratio=1.0)
    ours = run(**quantised(model_dir), **options)
    for found in (plain, ours):
        trainable = {n: p for n, p in found.trainer.model.named_parameters() if p.requires_grad}
        assert trainable and all("lora" in n and p.dtype == torch.bfloat16 for n, p in trainable.items())
    assert relative_error(same.gradient, plain.gradient) < 3e-2

    # Near the threshold rounding decides, so the gradient is compared for the tokens that were kept
    selection = ours.trainer.last_selection
    exact, _, _ = selected_coefficients(plain)
    kept = selection.kept.split([len(mask) for mask in exact])
    both = sum(int((a & b).sum()) for a, b in zip(kept, exact, strict=True))
    assert 0.85 * selection.kept.sum() <= both
    scale = selection.mask.sum() / selection.kept.sum()
    grads = [logps.grad for logps, _, _ in plain.trainer.heard]
    weights = [torch.where(k, g * scale, 0.0) for k, g in zip(kept, grads, strict=True)]
    model = plain.trainer.accelerator.unwrap_model(plain.trainer.model, keep_fp32_wrapper=False)  # no autocast
    model.load_state_dict(plain.steps[0].weights)
    model.float()
    of_all = relative_error(plain.gradient, weighted_gradient(model, plain.steps[0], grads))
    of_kept = relative_error(ours.gradient, weighted_gradient(model, plain.steps[0], weights))
    assert of_kept < 2 * of_all < 0.2, f"{of_kept:.4f} and {of_all:.4f}: further from float32 than a plain trainer is"
    assert relative_error(ours.gradient, plain.gradient) > 0.4
    before, after = ours.steps[0].weights, ours.trainer.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora" in name for name in changed)
