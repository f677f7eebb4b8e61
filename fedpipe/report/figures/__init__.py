"""Figures, one a file; each is saved as SVG and PNG, with the same bytes each time."""
