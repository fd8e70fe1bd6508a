"""A narrow model and one batch of it, and shorter calls of the planner."""

from __future__ import annotations

from typing import Any

from sana_pipe.config import Config
from sana_pipe.data.encoders.text_kind import max_length
from sana_pipe.tools.planning import auto
from sana_pipe.tools.planning.predict import Data, Machine
from sana_pipe.tools.planning.search import Search
from sana_pipe.tools.planning.trace import Shape
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel.mesh import Layout

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


def data_of(config: Config) -> Data:
    return Data.configured(config.model, config.data, config.bucket, max_length(config.text))


def decide(
    config: Config, shape: SanaConfig, data: Data, machine: Machine, begun: auto.Begun | None = None
) -> tuple[TrainConfig, list[str]]:
    """`auto.decide` by a search that is opened where it is needed."""
    return auto.decide(config.train, machine, lambda: Search(shape, data, machine, config.supports), begun)
