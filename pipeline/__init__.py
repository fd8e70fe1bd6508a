"""sana-pipe: latent and text caches, resolution buckets and a lean trainer for Sana diffusion transformers."""

__version__ = "0.1.0"
