"""What a user runs: one file per stage. Each has `run(config, **options)`; none imports another."""
