"""What a run is expected to need, beside what it measures.

What: `Expected` has the planner's prediction of a run; `compare` sets a row of metrics beside it. The journal does that
once, after the second row (the first contains the start), or at the end of a shorter run.
Memory: on a GPU what torch has allocated, without context and fragmentation. On the CPU the growth of the resident set
since before the model was built, and only where 2 GiB or more are predicted: below that, buffers of the loader and of
libraries weigh too much.
Speed: compared by model FLOPs, because the pictures of the row are of other sizes than the predicted bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEANINGFUL = 2 << 30
"""Bytes of main memory below which the resident set is not compared."""
TOLERANCE = 0.1
"""A larger deviation is shown as a warning."""


@dataclass(frozen=True)
class Expected:
    """A prediction for the worst bucket.

    Attributes:
        lasting, brief: bytes of the fullest process, whatever the bucket, and in proportion to the image tokens of a
            forward pass. tokens: of the worst bucket's.
        flops_per_s: model FLOPs of all processes together; None: the device's speed is not known.
        is_bound: predicted without compiled blocks, which need about as much memory or less.
        before: on the CPU, resident bytes of this process before the model was built; None on a GPU.
        document: of the run directory.
    """

    lasting: float
    brief: float
    tokens: int
    flops_per_s: float | None
    before: float | None
    document: dict[str, Any]
    is_bound: bool = False

    def compare(self, row: dict[str, Any]) -> dict[str, float]:
        """`KIND_predicted` and `KIND` for `memory_gib` and `images_per_s`, as far as they can be compared."""
        result: dict[str, float] = {}
        memory = self.lasting + self.brief * min(1.0, row["forward_tokens"] / self.tokens)
        measured = row["memory_gib"] if self.before is None else row["rss_gib"] - self.before / 2**30
        if self.before is None or memory >= MEANINGFUL:
            result |= {"memory_gib_predicted": memory / 2**30, "memory_gib": measured}
        if self.flops_per_s is not None and row["model_tflops"]:
            ratio = self.flops_per_s / (row["model_tflops"] * 1e12)
            result |= {"images_per_s_predicted": row["images_per_s"] * ratio, "images_per_s": row["images_per_s"]}
        return result

    def lines(self, compared: dict[str, float], step: int) -> list[str]:
        """The comparison for people; a line for each large deviation."""
        parts, warnings = [], []
        for kind, name, unit in (("memory_gib", "memory", "GiB"), ("images_per_s", "speed", "images/s")):
            if kind not in compared:
                continue
            predicted, measured = compared[f"{kind}_predicted"], compared[kind]
            deviation = measured / predicted - 1
            parts.append(f"{name} {predicted:.3g} and {measured:.3g} {unit} ({deviation:+.0%})")
            if abs(deviation) > TOLERANCE and not (self.is_bound and deviation < 0):
                side = "above" if deviation > 0 else "below"
                warnings.append(f"warning: the {name} is {abs(deviation):.0%} {side} the prediction")
        return [f"predicted and measured until step {step}: {', '.join(parts)}", *warnings] if parts else []
