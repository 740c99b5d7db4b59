"""Measures the candidates of a room on this card and writes the table that it then reads."""
