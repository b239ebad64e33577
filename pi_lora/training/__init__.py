"""Recipe to run folder: the trainer, its log, schedule and scores."""
