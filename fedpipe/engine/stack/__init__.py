"""The client side of a round for many clients in one ``vmap`` call."""
