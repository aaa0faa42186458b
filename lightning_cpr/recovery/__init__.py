"""What comes back after a failure, and how a lost process is replaced; nothing here knows Lightning."""
