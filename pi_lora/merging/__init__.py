"""Adapter and base to full weights that every engine loads with their scaling, in bounded memory, and checked."""
