"""Which rows and columns a forward needs, and dealing them over the micro-batches of an optimizer step.

TRL pads every micro-batch to the longest prompt and answer of the generation batch. A pack holds only the rows that are
needed, each from its first real token to the last token that is needed, ended at the same column and as wide as the
longest. Leaving out what comes after is exact for causal models; leaving out padding before is exact where each token
keeps its position, so packs carry the columns that the tokens had as position ids.

Pure index arithmetic on tensors. Left to others: what is needed and why (`trainer.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Pack:
    """Rows of a padded batch (R, P + T), cut to what is needed: r rows, W columns, the last t of them completion."""

    rows: torch.Tensor
    """int64 (r,): row of the batch."""
    columns: torch.Tensor
    """int64 (r, W): column of the batch; negative where the pack has padding."""
    prompt_width: int
    """P."""
    completion_width: int
    """t: the columns at the end of the pack that hold every completion token needed."""

    def gather(self, values: torch.Tensor, padding: int) -> torch.Tensor:
        """Values of shape (R, P + T) at the tokens of the pack, (r, W)."""
        taken = values[self.rows[:, None], self.columns.clamp(min=0)]
        return taken.masked_fill(self.columns < 0, padding)

    def gather_completion(self, values: torch.Tensor) -> torch.Tensor:
        """Values of shape (R, T) at the last t columns of the pack, (r, t); zero at prompt and padding."""
        positions = self._completion_positions()
        taken = values[self.rows[:, None], positions.clamp(min=0)]
        return taken.masked_fill(positions < 0, 0)

    def scatter_completion(self, values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """The inverse of `gather_completion`: a copy of the (R, T) tensor `into` with (r, t) values written to it."""
        positions = self._completion_positions()
        row, column = torch.nonzero(positions >= 0, as_tuple=True)
        return into.to(values.dtype).index_put((self.rows[row], positions[row, column]), values[row, column])

    def _completion_positions(self) -> torch.Tensor:
        return self.columns[:, -self.completion_width :] - self.prompt_width


def make_packs(attention_mask: torch.Tensor, needed: torch.Tensor, num_packs: int, max_rows: int) -> list[Pack]:
    """
    Deal the rows with a needed token over exactly `num_packs` packs, sorted by length so that little is padded.

    The number of packs does not depend on what is needed, so that every process runs the model equally often; where
    nothing is left for a pack it holds the shortest prompt and one column of padding, so that it can still be run.
    No pack has more than `max_rows` rows or more columns than the batch.

    Args:
        attention_mask (`torch.Tensor` of shape `(R, P + T)`): integer, prompts padded on the left, completions on the
            right.
        needed (`torch.Tensor` of shape `(R, T)`): bool, completion tokens whose log-probs are needed.
        num_packs (`int`): at least R / max_rows.
        max_rows (`int`): rows that a pack may hold.

    Returns:
        `list[Pack]` of length `num_packs`.
    """
    num_rows, total_width = attention_mask.shape
    prompt_width = total_width - needed.size(1)
    starts = attention_mask[:, :prompt_width].int().argmax(dim=1)  # first real token of the prompt
    ends = prompt_width + _last_true(needed) + 1
    lengths = ends - starts

    busy = torch.nonzero(needed.any(dim=1)).squeeze(1)
    order = busy[torch.argsort(lengths[busy], descending=True, stable=True)]
    rows_per_pack = -(-len(order) // num_packs)
    if rows_per_pack > max_rows:
        raise ValueError(f"{len(order)} rows do not fit into {num_packs} packs of {max_rows}.")
    idle = lengths.argmin().view(1)

    packs = []
    for number in range(num_packs):
        rows = order[number * rows_per_pack : (number + 1) * rows_per_pack]
        if len(rows) == 0:
            rows = idle
            row_ends = torch.full_like(rows, prompt_width + 1)
        else:
            row_ends = ends[rows]
        width = int((row_ends - starts[rows]).max())
        columns = row_ends[:, None] - width + torch.arange(width, device=rows.device)
        columns = columns.masked_fill(columns < starts[rows][:, None], -1)
        if rows is idle:
            columns[:, -1] = -1  # a token of its row may be needed, and is in another pack already
        packs.append(Pack(rows, columns, prompt_width, int(row_ends.max()) - prompt_width))
    return packs


def whole_rows(sizes: Sequence[int], prompt_width: int, completion_width: int, device: torch.device) -> list[Pack]:
    """
    Packs that leave nothing out: consecutive rows, `sizes` of them, in all their columns.

    Args:
        sizes (sequence of `int`): rows of each pack.
        prompt_width, completion_width (`int`): P and T.
        device: of the index tensors.
    """
    columns = torch.arange(prompt_width + completion_width, device=device)
    rows = torch.arange(sum(sizes), device=device).split(list(sizes))
    return [Pack(part, columns.expand(len(part), -1), prompt_width, completion_width) for part in rows]


def _last_true(mask: torch.Tensor) -> torch.Tensor:
    """int64 (R,): the last column of each row that is true; -1 where none is."""
    columns = torch.arange(mask.size(1), device=mask.device).expand_as(mask)
    return columns.masked_fill(~mask, -1).max(dim=1).values
