"""What studies look at in stored states: a module a kind, with a function ``probe(run, round, settings) -> Table``."""
