"""Trains an EAGLE-3 draft on the text that its target writes."""
