"""Recipes: the schema of their keys (`schema`), and reading their files (`files`)."""
