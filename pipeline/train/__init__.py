"""The wing from batches to checkpoints. Of the data it sees the loader, a snapshot's head and what a batch is."""
