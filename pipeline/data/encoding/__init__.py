"""The way from sources to the cache: scan, plan, work."""
