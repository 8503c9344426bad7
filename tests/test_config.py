"""The config: what it adds, what it parses, and what it refuses and how it says so."""

import dataclasses
import sys

import pytest
from trl import GRPOConfig, TrlParser

from harness import FixedRollouts, config_arguments, dataset, load_policy, spread_reward, tokenizer
from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer


DEFAULTS = {
    "token_selection": "gmts",
    "selection_ratio": 0.2,
    "selection_scope": "batch",
    "selection_base": "all",
    "select_bottom": False,
    "normalize_selected": True,
    "skip_unselected": True,
    "dynamic_sampling": False,
    "max_resample_rounds": 10,
}


def config(**arguments) -> GMTSGRPOConfig:
    return GMTSGRPOConfig(**({"output_dir": "unused", "use_cpu": True, "bf16": False} | arguments))


def test_adds_exactly_the_documented_fields():
    ours = {field.name: field for field in dataclasses.fields(GMTSGRPOConfig)}
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    added = {name: field for name, field in ours.items() if name not in theirs}
    assert issubclass(GMTSGRPOConfig, GRPOConfig)
    assert {name: field.default for name, field in added.items()} == DEFAULTS
    for name, field in added.items():
        assert len(field.metadata["help"]) > 20, f"{name} has no help text"
        assert f"{name} (`" in GMTSGRPOConfig.__doc__, f"{name} is not documented"


def test_changes_no_default_of_grpo():
    ours = {field.name: field for field in dataclasses.fields(GMTSGRPOConfig)}
    for field in dataclasses.fields(GRPOConfig):
        assert ours[field.name].default == field.default, field.name
        assert ours[field.name].default_factory == field.default_factory, field.name


COMMAND_LINE = {
    "token_selection": ("entropy", "entropy"),
    "selection_ratio": ("0.35", 0.35),
    "selection_scope": ("group", "group"),
    "selection_base": ("scored", "scored"),
    "select_bottom": ("true", True),
    "normalize_selected": ("false", False),
}


def test_command_line_sets_every_field():
    arguments = ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false"]
    for name, (text, _) in COMMAND_LINE.items():
        arguments += [f"--{name}", text]
    (parsed,) = TrlParser([GMTSGRPOConfig]).parse_args_and_config(arguments)
    assert {name: getattr(parsed, name) for name in COMMAND_LINE} == {k: v for k, (_, v) in COMMAND_LINE.items()}
    assert all(parsed_value != DEFAULTS[name] for name, (_, parsed_value) in COMMAND_LINE.items())


def test_command_line_leaves_the_defaults():
    arguments = ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false"]
    (parsed,) = TrlParser([GMTSGRPOConfig]).parse_args_and_config(arguments)
    assert {name: getattr(parsed, name) for name in DEFAULTS} == DEFAULTS


def test_yaml_sets_every_field(tmp_path, monkeypatch):
    lines = ["output_dir: unused", "use_cpu: true", "bf16: false"]
    lines += [f"{name}: {text}" for name, (text, _) in COMMAND_LINE.items()]
    file = tmp_path / "grpo.yaml"
    file.write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])
    (parsed,) = TrlParser([GMTSGRPOConfig]).parse_args_and_config()
    assert {name: getattr(parsed, name) for name in COMMAND_LINE} == {k: v for k, (_, v) in COMMAND_LINE.items()}


def test_help_shows_every_field(capsys):
    with pytest.raises(SystemExit):
        TrlParser([GMTSGRPOConfig]).parse_args_and_config(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in DEFAULTS)


def test_command_line_refuses_a_bad_value(capsys):
    with pytest.raises((ValueError, SystemExit)):
        TrlParser([GMTSGRPOConfig]).parse_args_and_config(
            ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false", "--token_selection", "best"]
        )


REFUSED = {
    "unknown selection": (
        {"token_selection": "best"},
        ["token_selection", "best", "gmts", "entropy", "random", "none"],
    ),
    "selection of another case": ({"token_selection": "GMTS"}, ["token_selection", "GMTS"]),
    "no selection": ({"token_selection": None}, ["token_selection", "None"]),
    "unknown scope": ({"selection_scope": "prompt"}, ["selection_scope", "prompt", "batch", "group", "sequence"]),
    "unknown base": ({"selection_base": "some"}, ["selection_base", "some", "all", "scored"]),
    "ratio zero": ({"selection_ratio": 0.0}, ["selection_ratio", "0.0", "(0, 1]"]),
    "ratio negative": ({"selection_ratio": -0.2}, ["selection_ratio", "-0.2", "(0, 1]"]),
    "ratio above one": ({"selection_ratio": 1.01}, ["selection_ratio", "1.01", "(0, 1]"]),
    "ratio in percent": ({"selection_ratio": 20}, ["selection_ratio", "20", "(0, 1]"]),
    "ratio not a number": ({"selection_ratio": float("nan")}, ["selection_ratio", "nan", "(0, 1]"]),
    "ratio infinite": ({"selection_ratio": float("inf")}, ["selection_ratio", "inf", "(0, 1]"]),
    "ratio none": ({"selection_ratio": None}, ["selection_ratio", "None", "(0, 1]"]),
    "top_entropy_quantile too": (
        {"top_entropy_quantile": 0.2},
        ["top_entropy_quantile", "0.2", "token_selection='entropy'", "token_selection='none'"],
    ),
    "top_entropy_quantile too, entropy": (
        {"top_entropy_quantile": 0.9, "token_selection": "entropy"},
        ["top_entropy_quantile", "0.9"],
    ),
    "window not in memory": (
        {
            "steps_per_generation": 3,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
        },
        ["steps_per_generation", "3", "gradient_accumulation_steps", "2", "multiple"],
    ),
    "window larger than a generation": (
        {
            "steps_per_generation": 2,
            "gradient_accumulation_steps": 4,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
        },
        ["steps_per_generation", "2", "gradient_accumulation_steps", "4", "multiple"],
    ),
    "window not in memory, by generation_batch_size": (
        {
            "generation_batch_size": 12,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
        },
        ["steps_per_generation", "3", "gradient_accumulation_steps", "2", "generation_batch_size"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_to_change(case):
    arguments, words = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        config(**arguments)
    message = str(refusal.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message!r}"


@pytest.mark.parametrize(
    "arguments",
    [
        {"selection_ratio": 1.0},
        {"selection_ratio": 1},
        {"selection_ratio": 1e-6},
        {"token_selection": "none", "top_entropy_quantile": 0.2},
        {"token_selection": "none", "selection_ratio": 0.2},
        {
            "token_selection": "none",
            "steps_per_generation": 3,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
        },
        {
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
        },
        {"select_bottom": True, "token_selection": "random"},
        {"loss_type": "grpo", "num_iterations": 4, "beta": 0.1},
    ],
    ids=str,
)
def test_accepted(arguments):
    built = config(**arguments)
    assert all(getattr(built, name) == value for name, value in arguments.items())


def build(model_dir, args, trainer_class=GMTSGRPOTrainer):
    return trainer_class(
        model=load_policy(model_dir),
        reward_funcs=spread_reward,
        args=args,
        train_dataset=dataset(),
        processing_class=tokenizer(),
        rollout_func=FixedRollouts(),
    )


def test_a_plain_grpo_config_is_refused(model_dir, run_dir):
    with pytest.raises((TypeError, ValueError)) as refusal:
        build(model_dir, GRPOConfig(output_dir=run_dir, **config_arguments()))
    assert "GRPOConfig" in str(refusal.value) and "GMTSGRPOConfig" in str(refusal.value)


def test_without_args_the_config_is_ours(model_dir, tmp_path, monkeypatch):
    """As in GRPOTrainer the output folder is named after the model; the selection is on."""
    monkeypatch.chdir(tmp_path)
    # TRL's defaults want bf16, which transformers grants to a CPU only on request
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = build(model_dir, None)
    assert type(trainer.args) is GMTSGRPOConfig
    assert {name: getattr(trainer.args, name) for name in DEFAULTS} == DEFAULTS
    assert model_dir.split("/")[-1] in trainer.args.output_dir


def test_positional_arguments_are_those_of_grpo(model_dir, run_dir):
    """Swapping the class name is all a user does, with positional arguments too."""
    args = GMTSGRPOConfig(output_dir=run_dir, **config_arguments())
    positional = (load_policy(model_dir), spread_reward, args, dataset(), None, tokenizer())
    trainer = GMTSGRPOTrainer(*positional, rollout_func=FixedRollouts())
    assert trainer.args is args
    trainer.train()
    assert "gmts/kept_tokens" in trainer.state.log_history[0]


@pytest.mark.parametrize("name", ["select_bottom", "normalize_selected", "skip_unselected"])
def test_refuses_what_only_looks_like_a_boolean(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'false'"):
        config(**{name: "false"})


def test_a_field_set_after_the_config_was_built_is_checked_again(model_dir):
    args = config()
    args.token_selection = "GMTS"
    with pytest.raises(ValueError, match="token_selection must be one of"):
        GMTSGRPOTrainer(model=model_dir, reward_funcs=spread_reward, args=args, train_dataset=dataset())
