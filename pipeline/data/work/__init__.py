"""Work over units: claims, engines, stop signals, disk space, progress."""
