"""Networks, one family a module.

``base`` has the interface. Modules that several families share, such as ``blocks``, are no components.
"""
