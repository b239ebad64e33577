"""Files that others may have made, read with limits and checked against a schema."""
