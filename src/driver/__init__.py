"""dracpu."""
