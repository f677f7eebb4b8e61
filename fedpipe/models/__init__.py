"""Models: one family a file; every model is a body (the extractor) and a head (the classification layer)."""
