"""Figures, one per file. Each is saved as SVG, PDF and PNG, with reproducible bytes."""
