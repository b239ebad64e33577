"""The measurements, a module each, with typed scores, metrics and pictures; what they share; and lm-eval's harness."""
