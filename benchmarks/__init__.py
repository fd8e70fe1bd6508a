"""Measurements behind the figures that the documentation states; `python -m benchmarks` lists and runs them."""
