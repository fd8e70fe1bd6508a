"""From sources to the cache: scan, plan, work."""
