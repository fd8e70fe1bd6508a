"""The kit: all that a machine with a GPU is needed for, in one command, without network.

    python -m benchmarks.gpu --minutes 25 --wheels wheels --out kit.jsonl

Rows (`benchmarks.gpu.rows`) are in order of value, so that a short session yields the most. Each is a process with a
time limit; after one that fails the next is run, and the exit code is 1. Each result is printed, and appended to
--out, as a line of JSON as soon as it is there. Rows that no time is left for are listed.

    --rows NAME ...  rows of these names, or of these groups (`step`: step/fast and the others), in this order
    --dry            every row on the CPU with tiny shapes, in one process: whether the kit works, no figure of a GPU
    --list           names, limits in seconds and figures of the rows

Released weights are not needed: models are real classes of diffusers and transformers at released sizes, with random
values. The machine needs torch 2.11 for CUDA with Triton, transformers and pytest, on Python 3.12. The rest comes as
wheels, listed in `benchmarks/gpu/wheels.txt` with the command that collects them; --wheels installs them next to
themselves, without touching the machine's packages.
"""
