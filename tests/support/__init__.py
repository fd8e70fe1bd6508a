"""What tests share: synthetic caches, tiny models, workers that tests start as processes."""
