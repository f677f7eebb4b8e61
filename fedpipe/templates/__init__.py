"""What `fedpipe new-algorithm` starts from: real files, which the linters read as they stand."""
