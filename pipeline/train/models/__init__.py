"""The networks: Sana itself, its encoders and decoder, flow matching and its sampler."""
