"""All weights of a checkpoint's model, also where the checkpoint holds only a part of it.

A run with an adapter (`train.adapter`, `train.only`) trains a part, and its checkpoints hold no more. The rest is its
base, read here from `model.weights` and compared with the digest in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pipeline.config import Config
from pipeline.models.adapters import Merged, adapter_from
from pipeline.models.spec import digest_of
from pipeline.training.build import check_base, start_values
from pipeline.training.checkpoint import ModelTensors


def whole_weights(config: Config, stored: ModelTensors, strength: float = 1.0) -> Mapping[str, Tensor]:
    """By parameter name: fp32, on the CPU, in the module's layout, each read on access.

    Args:
        config: with the base of the training in `model`.
        strength: a factor of an adapter's change; 0 is the base.

    Raises:
        UserError: another base than that of the training, or one that cannot be read.
    """
    adapter = adapter_from(stored.document.adapter)
    if adapter is None:
        return stored.exported()
    base = start_values(config, stored.architecture)
    check_base(stored.folder, stored.document.base, digest_of(base))
    return Merged(stored.architecture, adapter, base, stored.exported(), strength)
