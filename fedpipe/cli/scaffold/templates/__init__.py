"""Templates for `fedpipe new-algorithm` and `fedpipe init`."""
