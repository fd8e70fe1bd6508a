"""From sources to items, and from snapshots to batches.

`source` lists pictures and captions, `image` turns bytes into pixels, `captions` holds the text rules, `buckets` the
aspect-ratio tables; `schedule`, `loader` and `randomness` serve training. Nothing here imports a model.
"""
