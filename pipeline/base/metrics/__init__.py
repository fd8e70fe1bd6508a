"""Metrics of `encode` and `train` in one form: rows of JSON lines, accelerate's trackers, Prometheus' textfiles."""
