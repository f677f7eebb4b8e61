"""Downloads, file formats and tokenizers."""
