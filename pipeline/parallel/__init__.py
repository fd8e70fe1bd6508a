"""How a model is spread over processes and how its activations are kept: knows blocks, not models."""
