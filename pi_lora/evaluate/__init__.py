"""Model to scores: each measurement on the model and the documents that a user names."""
