"""Data sets, one per file: shape, number of classes, checksum, and the code that obtains the samples."""
