"""Data sets, partition schemes, the assignment of samples to clients, and the stored tensors.

`datasets` has one file per data set, `partitions` one per scheme. `sources` downloads and reads files, `assignment`
splits the samples of each client, and `store` saves and loads them.
"""
