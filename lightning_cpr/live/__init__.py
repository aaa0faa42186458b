"""Recovery in a running fit: the step is run again, lost rows come back, and what it cost is told."""
