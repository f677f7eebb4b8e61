"""The client side of a round: data, passes of one client at a time, optimizers and evaluation."""
