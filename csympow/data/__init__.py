"""Datasets: text to rows of tokens, and rows of tokens to batches."""
