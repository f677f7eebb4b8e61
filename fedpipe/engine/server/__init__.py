"""The server side of a round: aggregation and server optimizers."""
