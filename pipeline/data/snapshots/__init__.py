"""Decide which samples a snapshot has, and in which bucket: join, filters, selection, packing."""
