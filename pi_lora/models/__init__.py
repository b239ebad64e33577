"""Base models, adapters and runs: found, loaded with their scaling, quantized."""
