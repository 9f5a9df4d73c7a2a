"""The bill of a run: its numbers (`bill`) and how they look on a terminal (`terminal`)."""
