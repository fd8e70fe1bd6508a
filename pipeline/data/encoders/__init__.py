"""The frozen encoders, and the digests of their weights."""
