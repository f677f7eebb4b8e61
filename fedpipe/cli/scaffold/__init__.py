"""Files that `fedpipe init` and `fedpipe new-algorithm` write."""
