"""Strategies to parallelize a model and to save activation memory. They are handed blocks and know no model."""
