"""The table of a run's plots: which column of the journal each one shows, under which title, in which section.

A row is all that a plot needs: `run_figures` collects its column, `sections` draws it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunPlot:
    """A plot of a column of the journal over optimizer steps.

    Attributes:
        column: as the rows name it (`training.metrics.read`); of a loss with several parts each part has a curve, too.
        unit: the label of the axis.
        section: the id of the section of the page.
        scale: the factor of the values.
        compared: whether the comparison of two runs shows it.
    """

    column: str
    title: str
    unit: str
    section: str
    scale: float = 1.0
    compared: bool = False


PLOTS = (
    RunPlot("loss", "Training loss", "loss", "losses", compared=True),
    RunPlot("grad_norm", "Gradient norm before clipping", "norm", "losses", compared=True),
    RunPlot("lr", "Learning rate", "rate", "losses"),
    RunPlot("images_per_s", "Images per second, all processes", "images/s", "throughput", compared=True),
    RunPlot("tokens_per_s", "Image tokens per second, all processes", "tokens/s", "throughput"),
    RunPlot("data_wait", "Time that the slowest process waited for data", "% of the wall time", "data-wait", 100.0),
    RunPlot("mfu", "Model FLOPs utilisation", "MFU, %", "throughput", 100.0),
    RunPlot("memory_gib", "Peak of allocated GPU memory", "GiB", "memory"),
    RunPlot("reserved_gib", "Peak of reserved GPU memory", "GiB", "memory"),
    RunPlot("rss_gib", "Main memory of the largest process", "GiB", "memory"),
    RunPlot("loss_scale", "Loss scale (fp16)", "factor", "losses"),
)
"""The plots, those of a section in their order there."""
