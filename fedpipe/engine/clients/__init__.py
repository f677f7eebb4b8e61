"""The client side of a round: its data, its passes one client after the other, its optimizer and its evaluation."""
