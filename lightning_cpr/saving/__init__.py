"""Saving behind the training: when, which rows, by which thread, and what chains of versions become."""
