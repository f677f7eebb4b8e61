"""Options that every algorithm can have: FedDW's regularizer, ``dw``."""
