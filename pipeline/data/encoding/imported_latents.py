"""Latents of others, before they enter the cache: a few are decoded, and compared with the declared VAE."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache import scan_table
from sana_pipe.data.cache.encodings import pictures_of
from sana_pipe.data.encoders import imported
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoding.source_plan import Inputs
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.sources.source import Place


def judged(inputs: Inputs, scan: pa.Table, vae: VaeConfig, device: Callable[[], Any]) -> str:
    """Decode latents at equal distances in a scan, and write their pictures to the cache's reports.

    Args:
        device: gives the device; called if there is something to decode.

    Returns:
        A line about them.

    Raises:
        UserError: they do not fit the declared VAE or scale.
    """
    lead = pictures_of(inputs.encodings)[0]
    assert isinstance(lead, LatentEncoding)
    assert lead.imported is not None
    usable = scan.filter(pc.is_null(scan.column("reject")))
    if not len(usable):
        return "no usable latents"
    rows = np.unique(np.linspace(0, len(usable) - 1, imported.JUDGED).astype(np.int64))
    chosen = usable.select([*scan_table.PLACE.names, "height", "width"]).take(pa.array(rows)).to_pylist()
    latents, found = [], set[str]()
    for row in chosen:  # those that are bad alone are rejected one by one
        latent = imported.parsed(inputs.source.read(Place(row["item"], row["part"], row["where"])))
        if latent.shape != lead.shape(row["height"], row["width"]):
            found.add(f"{len(latent)} channels")
        elif np.isfinite(latent).all():
            latents.append(lead.of_others.normalised(latent))
        else:
            found.add("values that are not finite")
    if not latents:
        raise UserError(
            f"source {inputs.source.name!r}: none of {len(chosen)} latents can be of the configured VAE",
            expected=f"{lead.channels} channels of finite values",
            found=", ".join(sorted(found)),
            fix="--set vae.id=ID, the VAE that made them",
        )
    strip, line = imported.judge(inputs.source.name, latents, vae, device())
    buffer = io.BytesIO()
    strip.save(buffer, "PNG")
    path = inputs.cache.files.reports / f"imported-{inputs.source.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return f"{line}; their pictures: {path}"


def are_new(inputs: Inputs, scan: pa.Table) -> bool:
    """Return whether a scan has other latents, or another encoding, than the last one that was published."""
    last = inputs.cache.last_scan(inputs.source.name)
    if last is None or last["encodings"] != {encoding.kind: encoding.name for encoding in inputs.encodings}:
        return True
    columns = ["item", "digest"]
    return not inputs.cache.table(last["table"], columns).equals(scan.select(columns))
