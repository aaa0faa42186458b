"""Parity in memory (ECRM): groups of owners, its code, upkeep by differences, agreement after a failure, rebuild."""
