"""Text to training sequences: where documents come from, and how they are packed; the only home of `datasets`."""
