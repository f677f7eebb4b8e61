"""The sections of params.yaml, one module per section: keys, defaults and checks.

`params` has the checks across sections, `parser` the messages about mistakes, and `schema` the JSON Schema.
"""
