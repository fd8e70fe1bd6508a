"""The way from a snapshot to batches: schedule, plan of each step, verified reads, prefetch."""
