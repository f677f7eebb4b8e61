"""Algorithms, one a module.

``base`` has the interface. Modules that several algorithms share, such as ``passes``, are not components.
"""
