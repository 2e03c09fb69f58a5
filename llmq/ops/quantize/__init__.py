"""Numbers of eight and four bits, with the scales that belong to them: launchers."""
