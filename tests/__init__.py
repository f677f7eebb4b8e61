"""Tests of fedpipe. Its garbage is collected rarely, because the searches would take a tenth of the tests' time."""

import gc

gc.set_threshold(100_000, 20, 10)  # before fedpipe is imported, which restores this threshold for training
