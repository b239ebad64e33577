"""Memory, tokens and hours of a recipe before any weights are loaded."""
