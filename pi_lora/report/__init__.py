"""Scores to tables and pictures."""
