"""The weights that a run begins with, and all weights of a checkpoint, also where it holds only a part of the model.

A run with an adapter (`train.adapter`, `train.only`) trains a part, and its checkpoints hold no more. The rest is its
base, read here from `model.weights` and compared with the digest in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sana_pipe.base import hub
from sana_pipe.train.models.adapters import Merged, adapter_from
from sana_pipe.train.models.config import StartWeights
from sana_pipe.train.models.spec import ModelSpec, Values, digest_of
from sana_pipe.train.training.checkpoint import CheckpointError, ModelTensors, beginning, recorded_origin


def start_values(weights: StartWeights | None, seed: int, spec: ModelSpec) -> Values:
    """The model's parameters in a new run: the files of `model.weights`, or values drawn with `train.seed`."""
    if weights is None:
        return spec.initial(seed)
    return spec.stored(hub.resolve(weights, widest=True), weights.variant)


def check_base(folder: Path, trained: str | None, base: str | None) -> None:
    """Refuse another base than that of a checkpoint. trained, base: digest of its base (None: it has none), and of the
    configured one."""
    if trained is None:
        raise lacks_base(folder)
    if trained != base:
        raise CheckpointError(
            f"{folder}: was trained on another base",
            expected=f"weights with the digest {trained}",
            found=str(base),
            fix="restore model.weights; to train on these, begin a new run: --set train.output=DIR without --resume",
        )


def lacks_base(folder: Path) -> CheckpointError:
    """Say that a run has compared itself with no base (`train.prefer`) up to this checkpoint."""
    return CheckpointError(
        f"{folder}: holds no reference: its run began, or went on for a part, without train.prefer",
        expected="a run that began with train.prefer",
        fix=f"begin a new run, whose reference is this checkpoint: {beginning(folder)} in place of --resume",
    )


def first_weights(stored: ModelTensors) -> Mapping[str, Tensor] | None:
    """The weights that the run of a whole model began with, as `whole_weights` gives them: those of a checkpoint
    (`train --from`) or of `model.weights`; None if they were drawn at random.

    Raises:
        UserError: they are not there any more.
    """
    begun = recorded_origin(stored.folder.parents[1])
    if begun is not None:
        return ModelTensors(begun)
    weights = stored.document.config["model"].get("weights")
    if stored.document.began_from is not None:
        raise CheckpointError(f"{stored.folder}: the checkpoint that its run began from is not known")
    if weights is None:
        return None
    given = StartWeights.model_validate(weights)
    base = stored.architecture.stored(hub.resolve(given, widest=True), given.variant)
    read = ((name, base.read(name, [0] * len(shape), shape)) for name, shape in base.shapes.items())
    return {name: value.to(torch.float32, copy=True) for name, value in read}


def whole_weights(
    weights: StartWeights | None, seed: int, stored: ModelTensors, strength: float = 1.0
) -> Mapping[str, Tensor]:
    """Return the weights by parameter name: fp32, on the CPU, in the module's layout, each read on access.

    Args:
        weights, seed: as in `start_values`; another base than that of the training is refused.
        strength: a factor of an adapter's change; 0 is the base.
    """
    adapter = adapter_from(stored.document.adapter)
    if adapter is None:
        return stored
    base = start_values(weights, seed, stored.architecture)
    check_base(stored.folder, stored.document.base, digest_of(base))
    return Merged(stored.architecture, adapter, base, stored, strength)
