"""Figures, one a file; each is saved as SVG, PDF and PNG, with the same bytes each time."""
