"""The parts of `verify` besides reading (`cache.audit`): shares and rounds, findings, their outcomes, and repairs.

A *part* is what one process verifies at once (`cache.audit.Part`, or a step before or after these). A *round* is one
verification of everything, by one process or by several that share the parts.
"""
