"""Signals: the kinds of records that a cache holds, one module each."""
