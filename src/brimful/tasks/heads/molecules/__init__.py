"""Molecules as they are read: from tables and published datasets, each once through RDKit, with what it says of them."""
