"""Where samples come from: downloads, file formats and texts."""
