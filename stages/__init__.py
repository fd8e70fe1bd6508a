"""The commands, one file per stage. Each has `run(config, **options)`; none imports another."""
