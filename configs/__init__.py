"""The shipped configurations and launch scripts, as files of a package."""
