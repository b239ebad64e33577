"""What benchmarks/paper_in_small.py does, stage by stage."""
