"""Training: a run, its rounds and its files.

`run` has the rounds of a run. The folders have the client side (`clients`, `stack`), the server side (`server`),
analyses of states (`diagnostics`) and the settings of PyTorch (`torch_env`).
"""
