"""The files of results.

Where each one is (layout), how it is read and written (files), and how rounds are packed (packing, archive).
"""
