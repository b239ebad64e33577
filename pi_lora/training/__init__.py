"""Recipe to run folder: the trainer, its log, schedule and scores."""

import pi_lora.models  # noqa: F401  before TRL imports PEFT, which imports bitsandbytes
