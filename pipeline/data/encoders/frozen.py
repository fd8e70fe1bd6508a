"""Shared by the frozen networks: dtypes, bf16 bits, and the digest of their weights.

Why a digest over tensors, not files: equal weights are the same encoding however they are sharded.
Price: the digest reads every byte of the weights (5 GB for Gemma-2-2b).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from sana_pipe.base.config import Weights
from sana_pipe.base.errors import UserError
from sana_pipe.base.hub import ModelError, is_local, open_tensors

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class NonFiniteOutputError(UserError):
    """A network returned NaN or infinity. rows: positions in the batch; all others are finite."""

    def __init__(self, module: str, rows: Sequence[int], dtype: str):
        self.rows = tuple(rows)
        super().__init__(
            f"the {module} gave NaN or infinity for batch rows {', '.join(map(str, self.rows))}",
            expected="finite values",
            fix="set its dtype to fp32" if dtype != "fp32" else "look at these items, and at the weights",
        )


def provenance_of(weights: Weights) -> dict[str, Any]:
    """Hub id and revision, for the provenance of records; empty for a local folder."""
    if is_local(weights):
        return {}
    return {"model": weights.id, **({"revision": weights.revision} if weights.revision else {})}


def digest(files: Sequence[Path], rename: Callable[[str], str | None], architecture: dict[str, Any]) -> str:
    """xxh3-128 over the architecture and, in name order, name, dtype, shape and bytes of each tensor, in whatever files
    they are. rename: stored name -> the name to use, or None to leave the tensor out."""
    state = xxhash.xxh3_128()
    for key in sorted(architecture):
        state.update(f"{key}={architecture[key]!r}\0".replace("(", "[").replace(")", "]").encode())
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[Any, str]] = {}
        for path in files:
            handle = stack.enter_context(open_tensors(path))
            for stored in handle.keys():
                name = rename(stored)
                if name is None:
                    continue
                if name in places:
                    raise ModelError(f"{path} holds tensor {stored!r} a second time", fix="remove the stale shard")
                places[name] = (handle, stored)
        if not places:
            raise ModelError(
                f"{files[0].parent} holds none of the expected tensors", fix="give the model's folder as `id`"
            )
        for name in sorted(places):
            handle, stored = places[name]
            tensor = handle.get_tensor(stored)
            kind = handle.get_slice(stored).get_dtype()
            state.update(f"{name}\0{kind}\0{list(tensor.shape)}\0".encode())
            state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def bf16_bits(values: torch.Tensor) -> np.ndarray:
    """Bits after rounding to bf16 (to nearest, ties to even): uint16, same shape, on the CPU."""
    return values.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(bits: np.ndarray) -> torch.Tensor:
    """The bf16 tensor whose bits are `bits` (uint16); a copy."""
    return torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def finite_bits(values: torch.Tensor, module: str, dtype: str) -> np.ndarray:
    """`bf16_bits`; raises NonFiniteOutputError, with the rows, for values that are not finite after rounding."""
    rounded = values.to(torch.bfloat16)
    bad = ~torch.isfinite(rounded).reshape(len(rounded), -1).all(dim=1)
    if bool(bad.any()):
        raise NonFiniteOutputError(module, bad.nonzero().flatten().tolist(), dtype)
    return bf16_bits(rounded)
