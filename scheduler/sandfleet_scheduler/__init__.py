"""Decides where sandboxes live."""
