"""Position Interpolation in model configs: read, extended, and checked against what transformers builds."""
