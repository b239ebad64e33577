"""Why it works: the bounds of the paper's section 2, and how far real queries and keys stay below them."""
