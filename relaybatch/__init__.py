"""relaybatch: offline batch routing of instructions over a ladder of language models, with a measured bill."""

__version__ = "0.1.0"
