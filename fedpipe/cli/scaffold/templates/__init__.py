"""The files that `fedpipe new-algorithm` and `fedpipe init` start from."""
