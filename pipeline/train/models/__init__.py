"""The networks: Sana itself, its encoders and decoder, its objective and its sampler."""
