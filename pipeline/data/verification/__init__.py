"""The parts of `verify` besides reading (`cache.audit`): findings, their outcomes, and repairs."""
