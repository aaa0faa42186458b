"""The commands that look into a root, move versions in and out of it, and tidy it up. None needs a Trainer."""
