"""Runs sandboxes on a node."""
