"""The measurements: model in, numbers out."""
