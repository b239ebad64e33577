"""Memory, tokens and hours of a recipe before anything is loaded."""
