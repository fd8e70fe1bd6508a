"""Pictures: decoding, orientation, resizing, resolution buckets."""
