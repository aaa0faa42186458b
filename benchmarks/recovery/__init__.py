"""How long a job stands still when one of its processes is killed. See README.md."""

TABLES, WIDTH = 6, 64
STOCK_STEP = 3
"""After this step the stock way saves."""
