"""Seeing the tree: a snapshot as JSON, text and picture, and metrics. It reads the other rooms and decides nothing."""
