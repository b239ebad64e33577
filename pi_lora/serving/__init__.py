"""Serving an extended model: what to type, and whether a running server computes it."""
