"""Pages and help texts that are generated from the code."""
