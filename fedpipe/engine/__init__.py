"""Training: one run, its rounds and its files.

The folders have the client side (clients, stack), the server side (server), and analyses of states (diagnostics).
"""
