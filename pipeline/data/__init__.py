"""The wing from pictures and captions to batches. Imports the base alone."""
