"""The four papers: what they print, how it is laid out, and how what is measured here compares with it."""
