"""The server side of a round: aggregation, server optimizers, and the memory of both."""
