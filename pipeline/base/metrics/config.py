"""The section `metrics`."""

from __future__ import annotations

from typing import Literal

from sana_pipe.base.config import LocalPath, Section

Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"]


class MetricsConfig(Section):
    """Metrics of the stages `encode` and `train`; see docs/metrics.md."""

    textfile: LocalPath | None = None
    """Folder of Prometheus' textfile collector (node exporter's `--collector.textfile.directory`): each process writes
    `sana_pipe_*.prom` there; null: none."""
