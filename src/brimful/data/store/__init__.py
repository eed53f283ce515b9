"""The token store: reading it, what it says about itself, and writing it."""

from brimful.data.store.store import Store as Store
