"""What a recipe may say (`schema`) and how its files are read (`files`)."""
