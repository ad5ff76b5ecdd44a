"""Sana, SANA-1.5 and SANA-Sprint."""
