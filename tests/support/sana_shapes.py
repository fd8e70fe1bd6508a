"""Models of the shipped configurations."""

from __future__ import annotations

from sana_pipe.train.models.sana_config import SanaConfig

SMALL = SanaConfig(
    num_layers=28,
    num_attention_heads=36,
    num_cross_attention_heads=16,
    cross_attention_head_dim=72,
    cross_attention_dim=1152,
)
SHAPES = {
    "sana_600m_512": SMALL,
    "sana_1600m_1024": SanaConfig(),
    "sana15_1600m_1024": SanaConfig(qk_norm="rms_norm_across_heads"),
    "sana15_4800m_1024": SanaConfig(qk_norm="rms_norm_across_heads", num_layers=60),
}
