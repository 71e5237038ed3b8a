"""What convert.py is made of: readers of checkpoints, models by their tensors, and the writer of a model folder."""
