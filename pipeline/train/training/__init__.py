"""The training run: one step, the loop around it, the optimizer, checkpoints and metrics."""
