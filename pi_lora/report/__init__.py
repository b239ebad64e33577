"""Model cards, pictures, HTML pages, comparisons, and the upload to the hub."""
