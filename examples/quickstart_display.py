"""What the quickstart shows: a progress bar with the reward, answers side by side, kept tokens, a plot of the reward."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import ProgressCallback

from trl_gmts import TokenSelection


plt.switch_backend("agg")  # draws to files only
console = Console(highlight=False, soft_wrap=True)

SHOWN = {
    "reward": "reward",
    "gmts/kept_fraction": "kept",
    "gmts/threshold": "tau",
    "gmts/effective_answers": "answers",
    "gmts/entropy_overlap": "overlap",
}


class GMTSProgressCallback(ProgressCallback):
    """transformers' progress bar with the last reward and the last GMTS numbers beside it, instead of lines of logs."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("GMTS")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs:
            shown = {name: f"{logs[key]:.3g}" for key, name in SHOWN.items() if key in logs}
            if shown:
                self.training_bar.set_postfix(shown, refresh=False)


Answers = tuple[list[str], list[bool]]
"""Answers, and whether each is right."""


def show_answers(questions: list[str], before: Answers, after: Answers) -> None:
    """One line a question: the answer before training and the answer after."""
    count = len(questions)
    width = max(len(_one_line(text)) for text in before[0][:count])
    for question, old, new in zip(questions, zip(*before, strict=True), zip(*after, strict=True), strict=False):
        console.print(
            Text(f"  {question}   ") + _answer(*old).append(" " * (width - len(_one_line(old[0])) + 3)) + _answer(*new)
        )


def _answer(text: str, right: bool) -> Text:
    return Text("✓ " if right else "✗ ", style="green" if right else "red").append(_one_line(text), style="default")


def _one_line(text: str, limit: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def show_kept_tokens(selection: TokenSelection, tokenizer: PreTrainedTokenizerBase) -> None:
    """Of the answers of the last optimizer step that were kept in part, the one that weighs the most, those marked."""
    weights = selection.scores.where(selection.kept, 0).sum(dim=1)
    in_part = (selection.kept.any(dim=1) & (selection.mask & ~selection.kept).any(dim=1)).float()
    row = int((weights * in_part).argmax())
    mask, kept = selection.mask[row], selection.kept[row]
    tokens = [tokenizer.decode([i]) for i in selection.completion_ids[row][mask].tolist()]
    console.print(
        f"Tokens kept in the last step: {int(selection.kept.sum())} of {int(selection.mask.sum())}, in "
        f"{int(selection.kept.any(dim=1).sum())} of {len(selection.kept)} answers. One that was kept in part "
        f"(advantage {selection.advantages[row].flatten()[0].item():+.2f}), kept tokens marked:"
    )
    console.print(Text("  ") + mark_tokens(tokens, kept[mask].tolist(), brackets=not console.is_terminal))


def mark_tokens(tokens: list[str], kept: list[bool], brackets: bool) -> Text:
    """The tokens in a row, the kept ones in reverse video or, for files and pipes, in brackets."""
    text = Text()
    for is_kept, run in groupby(zip(tokens, kept, strict=True), key=itemgetter(1)):
        piece = "".join(token for token, _ in run).replace("\n", "⏎")
        text.append(f"[{piece}]" if is_kept and brackets else piece, style="bold reverse" if is_kept else "")
    return text


def save_reward_plot(path: Path, log_history: list[dict[str, Any]], before: float, after: float) -> None:
    """Mean reward of each step's sampled answers, with the held-out accuracy before and after."""
    steps = [log["step"] for log in log_history if "reward" in log]
    rewards = [log["reward"] for log in log_history if "reward" in log]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(steps, rewards, label="reward, training problems")
    axes.plot(
        [0, log_history[-1]["step"]], [before, after], "o", color="black", label="sampled accuracy, held-out problems"
    )
    axes.set(xlabel="optimizer step", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
