"""Networks, one family per module.

``base`` has the interface, ``from_function`` makes a model from a user's function, and ``purity`` checks that a network
is a pure function. ``blocks`` and ``layers`` have code that several families use.
"""
