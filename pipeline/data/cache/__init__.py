"""The on-disk format: names, bytes, checksums and publication. No models, no torch.

`cache_layout.md` at the top of the repository describes the same for readers of the files.
"""
