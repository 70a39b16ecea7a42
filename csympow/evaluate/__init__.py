"""What a trained model can do: its loss against context, and what it writes."""
