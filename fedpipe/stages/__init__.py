"""The stages of a study beside its rounds, each named as its rule: download, partition, collect, report."""
