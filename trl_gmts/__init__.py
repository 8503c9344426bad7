"""GMTS token selection for TRL's GRPO: train on the tokens that carry the gradient.

`GMTSGRPOConfig` and `GMTSGRPOTrainer` replace TRL's `GRPOConfig` and `GRPOTrainer`; everything else in a script stays.
"""

from .config import GMTSGRPOConfig
from .trainer import GMTSGRPOTrainer, TokenSelection


__version__ = "0.1.0"

__all__ = ["GMTSGRPOConfig", "GMTSGRPOTrainer", "TokenSelection"]
