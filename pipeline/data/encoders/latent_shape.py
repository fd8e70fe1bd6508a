"""The shape of latents before there is a cache: that of a released VAE by its name, of another by its `config.json`."""

from __future__ import annotations

from sana_pipe.base import hub
from sana_pipe.base.errors import UserError
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoders.vae_kind import vae_at

_RELEASED = {
    "Efficient-Large-Model/": (32, 32),
    "Tongyi-MAI/Z-Image": (8, 16),
    "Photoroom/prx-512-t2i-dc-ae": (32, 32),
}
"""Beginning of the id of a released VAE or pipeline -> pixels per latent side, and channels."""


def latent_shape(vae: VaeConfig) -> tuple[int, int] | None:
    """Pixels per latent side, and channels, of the configured VAE. Of a released one they are known without network.

    Returns:
        None: there is no such VAE, or its `config.json` cannot be read.
    """
    if not hub.is_local(vae):
        for name, shape in _RELEASED.items():
            if vae.id.startswith(name):
                return shape
    try:
        kind = vae_at(hub.resolve(vae, ("config.json",)))
    except UserError:
        return None
    return kind.compression, kind.channels
