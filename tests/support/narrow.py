"""A narrow model and one batch of it, for plans."""

from __future__ import annotations

from typing import Any

from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import Layout
from pipeline.planning.trace import Shape

NARROW = SanaConfig(
    num_layers=3,
    num_attention_heads=8,
    num_cross_attention_heads=4,
    cross_attention_head_dim=64,
    cross_attention_dim=256,
    caption_channels=64,
)
SHAPE = Shape(12, 12, 32, 2)
ALONE = Layout(1, 1, 1, 1)
COMPUTE: dict[str, Any] = {"microbatch": 8, "activation_checkpointing": "full", "compile": "none"}
