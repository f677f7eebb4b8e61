"""Data sets: one a file, each knows its shape, its checksum and how it is obtained."""
